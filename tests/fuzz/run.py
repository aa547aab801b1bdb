"""Runs a program plain and mirrored, from one source, and compares all that training leaves.

The source calls a machine ``m`` wherever replicas could matter. ``Plain`` does what a loop on one
device does: nothing. ``Mirrored`` splits, runs and reduces.
"""

import contextlib
import dataclasses
import linecache
import threading
import traceback
import warnings
from collections.abc import Mapping

import torch
from torch import nn

import mirror
from tests.fuzz.refusals import why_refused


def kept(value):
    """A copy of a nested value that later steps cannot change."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.to_dense() if value.layout is not torch.strided else value
        return torch.Tensor(value) if type(value) is nn.Parameter else value.clone()
    if isinstance(value, Mapping):
        return {key: kept(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [kept(entry) for entry in value]
    return value


class Plain:
    """One device, plain PyTorch."""

    convert = staticmethod(lambda module: module)
    mirror = staticmethod(lambda module: module)
    GradScaler = torch.amp.GradScaler

    def __init__(self):
        self.notes = []

    def note(self, name, value):
        self.notes.append((name, kept(value)))

    def scope(self):
        return contextlib.nullcontext()

    no_sync = scope

    def batches(self, batches, way, **options):
        return batches

    def step(self, way, loss_fn, update, batch):
        loss = loss_fn(batch)
        update(loss)
        return loss.detach()

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


class Mirrored(Plain):
    """N replicas."""

    convert = staticmethod(mirror.nn.convert_sync_batchnorm)
    GradScaler = mirror.amp.GradScaler

    def __init__(self, strategy, reduction):
        super().__init__()
        self.strategy = strategy
        self.reduction = reduction
        self.mirror = strategy.mirror
        self.scope = strategy.scope
        self.no_sync = strategy.no_sync
        self.check = strategy.check_replicas
        self._is_distributed = False

    def batches(self, batches, way, **options):
        self._is_distributed = way != 1
        if way == 1:
            return batches
        return self.strategy.distribute_dataset(batches, mirror.InputOptions(**options))

    def _distributed(self, batch):
        if self._is_distributed:
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

        def step(batch):
            loss = loss_fn(batch)
            update(loss)
            return loss.detach()

        return self.strategy.reduce(self.reduction, self.strategy.run(step, args=(batch,)))

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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        kind: ``"same"``, ``"refused"``, ``"differs"``, ``"error"``, ``"hangs"``, or ``"invalid"``
            where the plain program fails.
        bucket: what failures of one cause have in common, as far as one can see.
        text: the whole story.
    """

    kind: str
    bucket: str = ""
    text: str = ""

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


def run_program(program):
    """Runs a program both ways in this thread; returns its Outcome."""
    dtype = torch.get_default_dtype()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(program)
    finally:
        torch.set_default_dtype(dtype)


def _run(program):
    plain = Plain()
    try:
        compiled(program)["main"](plain)
    except Exception:
        return Outcome("invalid", "the plain program fails", traceback.format_exc())
    options = dict(program.strategy)
    pack = mirror.CommunicationOptions(bytes_per_pack=options.pop("bytes_per_pack"))
    devices = ["cpu"] * options.pop("n")
    reduction = options["gradient_reduction"]
    try:
        with mirror.MirroredStrategy(devices, communication_options=pack, **options) as strategy:
            mirrored = Mirrored(strategy, reduction)
            compiled(program)["main"](mirrored)
    except Exception as error:
        reason = why_refused(error)
        if reason:
            return Outcome("refused", reason, str(error))
        place = traceback.extract_tb(error.__traceback__)[-1]
        bucket = f"{type(error).__name__} at {place.name}: {str(error)[:90]}"
        return Outcome("error", bucket, traceback.format_exc())
    for (name, expected), (_, actual) in zip(plain.notes, mirrored.notes, strict=True):
        found = difference(actual, expected, name, program.tolerance)
        if found:
            return Outcome("differs", found.partition(":")[0].partition("[")[0], found)
    return Outcome("same")


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


def run_within(program, seconds):
    """Runs a program in a thread of its own, so that a hang is an outcome."""
    outcome = [Outcome("hangs", "hangs", f"nothing happened for {seconds} s")]
    thread = threading.Thread(target=lambda: outcome.insert(0, run_program(program)), daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]
