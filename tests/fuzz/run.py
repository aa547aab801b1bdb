"""Runs a program plain and mirrored, from one source, and compares all that training leaves.

The source calls a machine ``m`` wherever replicas could matter. ``Plain`` does what a loop on one
device does: nothing. ``Mirrored`` splits, runs and reduces.
"""

import contextlib
import copy
import dataclasses
import linecache
import math
import os
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping

import torch
from torch import nn

import mirror
from mirror.values import leaves_of, map_structure
from tests.fuzz.faults import why_refused
from tests.fuzz.programs import program as program_of


def copy_nested(value):
    """A copy of a nested value that later steps cannot change."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.to_dense() if value.layout is not torch.strided else value
        return torch.Tensor(value) if type(value) is nn.Parameter else value.clone()
    if isinstance(value, Mapping):
        return {key: copy_nested(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [copy_nested(entry) for entry in value]
    return value


class Plain:
    """One device, plain PyTorch."""

    convert = staticmethod(lambda module: module)
    mirror = staticmethod(lambda module: module)
    GradScaler = torch.amp.GradScaler
    device = torch.device("cpu")
    is_chief = True

    def __init__(self):
        self.recorded = []

    def record(self, name, value):
        self.recorded.append((name, copy_nested(value)))

    def scope(self):
        return contextlib.nullcontext()

    no_sync = scope

    def placed(self, batches):
        """Returns batches where a program makes them."""
        return batches

    def batches(self, batches, way, **options):
        return batches

    def step(self, way, loss_fn, update, batch):
        loss = loss_fn(batch)
        update(loss)
        return loss.detach()

    def compiled(self, loss_fn, update):
        """A step of way 3 that is compiled; takes a batch, and what else the loss takes."""
        whole = _whole_step(loss_fn, update)
        return lambda batch, *args: whole(batch, *args)

    def compiled_call(self, fn):
        """A function of a batch that is compiled; one result for the whole batch."""
        return fn

    def total(self, value):
        """The sum over the batch of what is a sum over a part of it."""
        return value

    def checkpoint(self, **objects):
        """What saves and restores objects."""
        return PlainCheckpoint(objects)

    def call(self, way, fn, batch):
        """A whole step in one function, or the forward of an evaluation."""
        return fn(batch)

    def average(self, per_example):
        """The mean over the examples of the whole batch."""
        return per_example.mean()

    def regularization(self, loss):
        """A term that does not depend on the batch."""
        return loss

    def weigh(self, weight):
        """Says what the batch counts in a mean over something else than examples."""

    def check(self):
        pass


class PlainCheckpoint:
    """Copies of the states of objects."""

    def __init__(self, objects):
        self.objects = objects

    def save(self):
        self.states = {k: copy.deepcopy(one.state_dict()) for k, one in self.objects.items()}

    def restore(self):
        for name, one in self.objects.items():
            one.load_state_dict(copy.deepcopy(self.states[name]))


class MirroredCheckpoint:
    """One of mirror's, in a folder of its own."""

    def __init__(self, objects):
        self.checkpoint = mirror.Checkpoint(**objects)
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "one")

    def save(self):
        self.checkpoint.save(self.path)

    def restore(self):
        self.checkpoint.restore(self.path)


class Mirrored(Plain):
    """N replicas.

    Attributes:
        steps: those that are compiled.
    """

    convert = staticmethod(mirror.nn.convert_sync_batchnorm)
    GradScaler = mirror.amp.GradScaler

    def __init__(self, strategy, reduction, mode="trace", fallback="error"):
        super().__init__()
        self.strategy = strategy
        self.reduction = reduction
        self.options = {"mode": mode, "fallback": fallback}
        self.steps = []
        self.mirror = strategy.mirror
        self.scope = strategy.scope
        self.no_sync = strategy.no_sync
        self.check = strategy.check_replicas

    def batches(self, batches, way, **options):
        if way == 1:
            return batches
        return self.strategy.distribute_dataset(batches, mirror.InputOptions(**options))

    def _distributed(self, batch):
        if any(isinstance(leaf, mirror.PerReplica) for leaf in leaves_of(batch)):
            return batch
        options = mirror.InputOptions(prefetch=0)
        return next(iter(self.strategy.distribute_dataset([batch], options)))

    def step(self, way, loss_fn, update, batch):
        if way == 1:
            return super().step(way, loss_fn, update, batch)
        batch = self._distributed(batch)
        if way == 2:
            losses = self.strategy.run(loss_fn, args=(batch,))
            loss = self.strategy.reduce(self.reduction, losses)
            update(loss)
            return loss.detach()

        losses = self.strategy.run(_whole_step(loss_fn, update), args=(batch,))
        return self.strategy.reduce(self.reduction, losses)

    def _compile(self, function):
        compiled = self.strategy.compile(function, **self.options)
        self.steps.append(compiled)
        return compiled

    def compiled(self, loss_fn, update):
        compiled = self._compile(_whole_step(loss_fn, update))

        def call(batch, *args):
            losses = compiled(self._distributed(batch), *args)
            return self.strategy.reduce(self.reduction, losses)

        return call

    def compiled_call(self, fn):
        compiled = self._compile(fn)
        return lambda batch: self.strategy.gather(compiled(self._distributed(batch)))

    def total(self, value):
        context = mirror.get_replica_context()
        return value if context is None else context.all_reduce("sum", value)

    def checkpoint(self, **objects):
        return MirroredCheckpoint(objects)

    def call(self, way, fn, batch):
        if way == 1:
            return fn(batch)
        values = self.strategy.run(fn, args=(self._distributed(batch),))
        if all(value.dim() for value in self.strategy.local_results(values)):
            return self.strategy.gather(values)
        return self.strategy.reduce(self.reduction, values)

    def average(self, per_example):
        if mirror.get_replica_context() is None:
            return per_example.mean()
        return mirror.nn.compute_average_loss(per_example)

    def regularization(self, loss):
        if mirror.get_replica_context() is None or self.reduction == "mean":
            return loss
        return mirror.nn.scale_regularization_loss(loss)

    def weigh(self, weight):
        replica = mirror.get_replica_context()
        if replica is not None:
            replica.weight = weight


def _whole_step(loss_fn, update):
    def step(batch, *args):
        loss = loss_fn(batch, *args)
        update(loss)
        return loss.detach()

    return step


class OnGpus(Mirrored):
    """N replicas on GPUs, whose program has its batches on the first one."""

    def __init__(self, strategy, reduction, **options):
        super().__init__(strategy, reduction, **options)
        self.device = strategy.devices[0]

    def placed(self, batches):
        return map_structure(lambda leaf: leaf.to(self.device), batches)

    def record(self, name, value):
        super().record(name, value)
        name, copied = self.recorded.pop()
        self.recorded.append((name, _on_cpu(copied)))


def _on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(entry) for key, entry in value.items()}
    return [_on_cpu(entry) for entry in value] if isinstance(value, list) else value


class Worker(Mirrored):
    """One of several processes, with some of the N replicas."""

    def __init__(self, strategy, reduction, **options):
        super().__init__(strategy, reduction, **options)
        self.rank, self.num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.is_chief = self.rank == 0

    def step(self, way, loss_fn, update, batch):
        if way != 1:
            return super().step(way, loss_fn, update, batch)
        own, num_examples, total = self._own_part(batch)
        loss = loss_fn(own)
        update(loss)
        return self._mean(loss.detach(), num_examples, total)

    def batches(self, batches, way, **options):
        if options.get("sharding") == "off" and way != 1:
            batches = [self._own_part(batch)[0] for batch in batches]
        options.pop("sharding", None) if way == 1 else None
        options.pop("weights", None)  # a weight for each replica of this process
        return super().batches(batches, way, **options)

    def _own_part(self, batch):
        """Returns this worker's part, the number of its examples, and that of all."""

        def part_of(leaf):
            return torch.as_tensor(leaf).tensor_split(self.num_workers)[self.rank]

        own = map_structure(part_of, batch)
        return own, len(leaves_of(own)[0]), len(leaves_of(batch)[0])

    def _mean(self, loss, num_examples, total):
        """Returns the mean over the examples of all workers."""
        num_local = len(self.strategy.devices)
        share = loss * num_examples / total / num_local if num_examples else torch.zeros_like(loss)
        return self.strategy.reduce("sum", self.strategy.run(lambda: share))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        kind: ``"same"``, ``"refused"``, ``"differs"``, ``"error"``, ``"hangs"``, or ``"invalid"``
            where the plain program fails.
        bucket: what failures of one cause have in common, as far as one can see.
        text: the whole story.
        num_traces: of all its compiled steps.
    """

    kind: str
    bucket: str = ""
    text: str = ""
    num_traces: int = 0

    @property
    def is_right(self):
        return self.kind in ("same", "refused")


def compiled(program):
    """The functions of a program's source; tracebacks show its lines."""
    name = f"<program {program.seed}>"
    linecache.cache[name] = (len(program.source), None, program.source.splitlines(True), name)
    namespace = {"__name__": f"program_{program.seed}"}
    exec(compile(program.source, name, "exec"), namespace)
    return namespace


def run_program(program, strategy_of=None):
    """Runs a program both ways in this thread; returns its Outcome.

    Args:
        strategy_of: makes the strategy of a program, and the machine over it; one process with
            ``n`` simulated devices if it is not given.
    """
    dtype = torch.get_default_dtype()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(program, strategy_of or _in_one_process)
    finally:
        torch.set_default_dtype(dtype)


def _in_one_process(n, options, mode):
    reduction = options["gradient_reduction"]
    if options.pop("is_central", False):
        options.pop("optimizer_state", None)
        strategy = mirror.CentralStorageStrategy(["cpu"] * n, **options)
        return strategy, Mirrored(strategy, reduction, mode=mode)
    strategy = mirror.MirroredStrategy(["cpu"] * n, **options)
    return strategy, Mirrored(strategy, reduction, mode=mode)


# Backends of programs that GPUs, or simulated ones, do not have.
_OF_SIMULATED_DEVICES = {"auto": "naive", "host": "naive"}


def on_gpus(where):
    """Returns what makes strategies of GPUs: one that all replicas share, or one for each."""

    def strategy_of(n, options, mode):
        numbers = [0] * n if where == "shared" else range(n)
        devices = [f"cuda:{i}" for i in numbers]
        if options["backend"] in _OF_SIMULATED_DEVICES:
            options["backend"] = _OF_SIMULATED_DEVICES[options["backend"]]
        if options["schedule"] == "lockstep":
            options["schedule"] = "auto"
        strategy = mirror.MirroredStrategy(devices, **options)
        return strategy, OnGpus(strategy, options["gradient_reduction"], mode=mode)

    return strategy_of


def counts_of(n):
    """Returns the number of replicas of each of two workers."""
    return (max(1, n // 2), max(1, n - n // 2))


def _of_worker(n, options, mode):
    options.pop("is_central", None)
    own = counts_of(n)[int(os.environ["RANK"])]
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"] * own, **options)
    return strategy, Worker(strategy, options["gradient_reduction"], mode=mode)


def run_as_worker(seed, fixed=None, *, is_compiled=False, mode="trace"):
    """Runs a seed's program in this process, one of two workers; returns its Outcome."""
    drawn = program_of(seed, fixed, of_workers=True, is_compiled=is_compiled, mode=mode)
    return run_program(drawn, _of_worker)


def _run(program, strategy_of):
    plain = Plain()
    try:
        compiled(program)["main"](plain)
    except Exception:
        return Outcome("invalid", "the plain program fails", traceback.format_exc())
    options = dict(program.strategy)
    pack = mirror.CommunicationOptions(bytes_per_pack=options.pop("bytes_per_pack"))
    options["communication_options"] = pack
    try:
        if guards := options.pop("guards", None):
            options["guards"] = eval(f"mirror.{guards}")
        strategy, mirrored = strategy_of(options.pop("n"), options, program.mode)
        with strategy, strategy.scope() if program.inside else contextlib.nullcontext():
            compiled(program)["main"](mirrored)
    except Exception as error:
        reason = why_refused(error)
        if reason:
            return Outcome("refused", reason, str(error))
        place = traceback.extract_tb(error.__traceback__)[-1]
        bucket = f"{type(error).__name__} at {place.name}: {str(error)[:90]}"
        return Outcome("error", bucket, traceback.format_exc())
    for (name, expected), (_, actual) in zip(plain.recorded, mirrored.recorded, strict=True):
        found = difference(actual, expected, name, program.tolerance)
        if found:
            return Outcome("differs", found.partition(":")[0].partition("[")[0], found)
    return Outcome("same", num_traces=sum(step.num_traces for step in mirrored.steps))


def difference(actual, expected, where, tolerance):
    """Says where two nested values differ first; empty if they do not."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
            return f"{where}: {getattr(actual, 'shape', actual)}, not {tuple(expected.shape)}"
        if actual.dtype != expected.dtype:
            return f"{where}: {actual.dtype}, not {expected.dtype}"
        if torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
            return ""
        size = float((actual - expected).abs().max())
        head, wanted = actual.flatten()[:4].tolist(), expected.flatten()[:4].tolist()
        return f"{where}: off by {size:.2e}; {head}, not {wanted}"
    if isinstance(expected, dict) and isinstance(actual, dict):
        if set(actual) != set(expected):
            return f"{where}: keys {sorted(map(str, actual))}, not {sorted(map(str, expected))}"
        pairs = [(key, actual[key], expected[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(actual) != len(expected):
            return f"{where}: {len(actual)} entries, not {len(expected)}"
        pairs = list(zip(range(len(expected)), actual, expected, strict=True))
    elif isinstance(expected, float) and isinstance(actual, int | float):
        same = abs(actual - expected) <= tolerance * max(1.0, abs(expected))
        return "" if same or actual == expected else f"{where}: {actual}, not {expected}"
    else:
        same = type(actual) is type(expected) and actual == expected
        return "" if same else f"{where}: {actual!r}, not {expected!r}"
    found = (difference(left, right, f"{where}[{key!r}]", tolerance) for key, left, right in pairs)
    return next(filter(None, found), "")


def run_within(program, seconds, strategy_of=None):
    """Runs a program in a thread of its own, so that a hang is an outcome.

    It hangs if this process has used next to no processor time for so many seconds. A busy machine
    makes it slow, not idle.
    """
    outcome = [Outcome("hangs", "hangs", f"nothing happened for {seconds} s")]
    thread = threading.Thread(
        target=lambda: outcome.insert(0, run_program(program, strategy_of)), daemon=True
    )
    thread.start()
    used = -math.inf
    while thread.is_alive() and time.process_time() - used > seconds / 200:
        used = time.process_time()
        thread.join(seconds)
    return outcome[0]
