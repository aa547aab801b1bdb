"""A training program over a public library, and the comparison with plain PyTorch."""

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

import mirror

NUM_REPLICAS = 3
SIZES = (7, 5, 8, 2)  # none divides; the last leaves a replica without an example
PASSES = 2
PAIRS = 3  # of timed steps, mirrored and plain in turn
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
CASES: dict[str, list["Case"]] = {}


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is trained.

    Attributes:
        make: returns the model; anything with parameters().
        batches: structures of tensors; the first dimension is the batch.
        loss: of a model and a batch; a mean over examples.
        optimizer: of parameters.
        after: called with the model after every step, outside ``run``.
        loop: a framework's own loop, over model, optimizer, all batches and the loss; returns the
            losses. For way 1.
        extra: of a trained model, what else is compared: tensors by name.
    """

    make: Callable[[], Any]
    batches: Sequence[Any]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Any], Any] = lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9)
    after: Callable[[Any], None] = lambda model: None
    loop: Callable[[Any, Any, Any, Any], list[float]] | None = None
    extra: Callable[[Any], dict[str, torch.Tensor]] = lambda model: {}


@dataclass(frozen=True)
class Case:
    library: str
    name: str
    program: Callable[[], Program]
    ways: Sequence[int] = (1, 3)
    remark: str = ""


@dataclass
class Row:
    """One line of the table.

    Attributes:
        difference: see ``difference``.
        ratios: processor times of mirrored steps over those of plain ones, in pairs.
        load: the machine's load average when it was done.
    """

    library: str
    name: str
    way: int
    verdict: str
    difference: float | None = None
    ratios: list[float] = field(default_factory=list)
    remark: str = ""
    load: float = 0.0


def case(library: str, name: str, *, ways: Sequence[int] = (1, 3), remark: str = "") -> Any:
    """Registers a function that returns a Program; it imports the library itself."""

    def register(program: Callable[[], Program]) -> Callable[[], Program]:
        CASES.setdefault(library, []).append(Case(library, name, program, ways, remark))
        return program

    return register


def rows_of(case: Case) -> Iterator[Row]:
    """Trains a case plainly and in each of its ways."""
    remarks = [case.remark] if case.remark else []
    try:
        program = case.program()
        plain, model, dtype = _plain(program)
    except Exception as error:
        for way in case.ways:
            yield Row(case.library, case.name, way, "not run", remark=_describe(error))
        return
    for way in case.ways:
        row = Row(case.library, case.name, way, "right")
        notes = list(remarks)
        try:
            trained = _mirrored(program, model, way, dtype, notes, row.ratios)
            row.difference = difference(trained, plain)
            if not row.difference < TOLERANCE[dtype]:
                row.verdict = "DIFFERS"
                if program.loop is None:
                    row.verdict, note = _cause(program, model, dtype, trained, plain)
                    notes.append(note)
        except (mirror.errors.MirrorError, NotImplementedError) as error:
            row.verdict, notes = "refused", [*remarks, _describe(error)]
        except Exception as error:
            row.verdict, notes = "ERROR", [*remarks, _describe(error)]
        if dtype is torch.float32:
            notes.append("float32")
        row.remark = "; ".join(notes)
        row.load = os.getloadavg()[0]
        yield row


def _cause(program: Program, model: Any, dtype: torch.dtype, mine: Any, plain: Any) -> Any:
    """Returns whether plain training differs as much if its sums are rounded differently.

    That is so where a network magnifies its rounding: each batch backwards is the same batch.
    """
    backwards = [tree_map(_flipped, batch) for batch in program.batches]
    with_order = replace(program, batches=backwards)
    control = difference(_Training(with_order, copy.deepcopy(model), dtype, _plainly).run(), plain)
    limit = TOLERANCE[dtype]
    early = difference(mine["early"], plain["early"])
    note = f"{early:.0e} after one step; plain with each batch backwards: {control:.0e}"
    is_chaotic = early < limit < control and difference(mine, plain) < 100 * control
    return "chaotic" if is_chaotic else "DIFFERS", note


def _cloned(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _flipped(x: Any) -> Any:
    return x.flip(0) if isinstance(x, torch.Tensor) else x


def difference(actual: dict[str, Any], plain: dict[str, Any]) -> float:
    """Returns the largest difference: of a loss, relative; of a tensor, against what it moved.

    A tensor that moved by less than a thousandth of what the furthest moved counts as that.
    """
    worst = max(
        abs(a - b) / max(abs(b), 1e-6)
        for a, b in zip(actual["losses"], plain["losses"], strict=True)
    )
    first, last, mine = plain["first"], plain["state"], actual["state"]
    if set(last) != set(mine):
        raise AssertionError(f"state_dict has other keys: {set(last) ^ set(mine)}")
    floating = [key for key in last if last[key].is_floating_point() or last[key].is_complex()]
    moved = {
        key: _far(last[key], first[key]) if key in first else float(last[key].abs().max())
        for key in floating
        if last[key].numel()
    }
    furthest = max(moved.values())
    for key in last:
        if key in moved:
            far = _far(mine[key], last[key]) / max(moved[key], 1e-3 * furthest)
            worst = max(worst, far if far == far else float("inf"))
        elif not torch.equal(mine[key], last[key]):
            return float("inf")
    return worst


def _far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.where(a == b, 0, (a - b).abs()).max())  # infinities may be equal


def _plain(program: Program) -> tuple[dict[str, Any], Any, torch.dtype]:
    """Trains in float64, or in float32 what knows nothing else."""
    torch.manual_seed(0)
    made = program.make()
    made.train()
    _without_draws(made)
    for dtype in (torch.float64, torch.float32):
        # Not to(dtype), which makes complex parameters real.
        model = copy.deepcopy(made).double() if dtype is torch.float64 else copy.deepcopy(made)
        try:
            torch.manual_seed(1)
            program.loss(copy.deepcopy(model), _cast(program.batches[0], dtype))
            before = copy.deepcopy(model)
            return _Training(program, model, dtype, _plainly).run(), before, dtype
        except (RuntimeError, ValueError, TypeError):
            if dtype is torch.float32:
                raise
    raise AssertionError


def _mirrored(
    program: Program, plain: Any, way: int, dtype: torch.dtype, notes: Any, ratios: list[float]
) -> Any:
    beside = _Training(program, copy.deepcopy(plain), dtype, _plainly)
    model = copy.deepcopy(plain)
    with mirror.MirroredStrategy(["cpu"] * NUM_REPLICAS) as strategy:

        def split(step: Any, batch: Any) -> Any:
            (parts,) = strategy.distribute_dataset([batch])
            return strategy.reduce("mean", strategy.run(step, args=(parts,)))

        with strategy.scope():
            strategy.mirror(model)
            for module in model.modules():
                if isinstance(module, _BatchNorm) and not _has_own_forward(module):
                    mirror.nn.convert_sync_batchnorm(module)
            if any(map(_has_own_forward, model.modules())):
                notes.append("its own batch norm in eval mode")
            training = _Training(program, model, dtype, split if way == 3 else _plainly)
            result = training.run()
        strategy.check_replicas()
        if program.loop is None:
            ratios += [training.time_of_a_step() / beside.time_of_a_step() for _ in range(PAIRS)]
    return result


def _plainly(step: Any, batch: Any) -> Any:
    return step(batch)


class _Training:
    """One model in training; ``how`` takes a step and a batch, and makes the step."""

    def __init__(self, program: Program, model: Any, dtype: torch.dtype, how: Any) -> None:
        self.program, self.model, self.how = program, model, how
        self.batches = _cast(program.batches, dtype)
        torch.manual_seed(1)
        self.optimizer = program.optimizer([p for p in model.parameters() if p.requires_grad])

    def run(self) -> dict[str, Any]:
        """Trains on all batches, and returns the losses and states, also those soon after."""
        program, model, first = self.program, self.model, _state(self.model)
        torch.manual_seed(1)
        losses: list[float] = []
        early: dict[str, Any] = {}
        for _ in range(PASSES):
            if program.loop is not None:
                losses += program.loop(model, self.optimizer, self.batches, program.loss)
                continue
            for batch in self.batches:
                losses.append(float(self.how(self._step, batch)))
                program.after(model)
                if not early:
                    early = {"losses": losses[:1], "first": first, "state": _state(model)}
        state = _state(model) | {k: v.detach().clone() for k, v in program.extra(model).items()}
        return {"losses": losses, "first": first, "state": state, "early": early}

    def time_of_a_step(self) -> float:
        batch = tree_map(_cloned, self.batches[0])  # libraries keep results by identity
        begin = time.process_time()
        float(self.how(self._step, batch))
        return time.process_time() - begin

    def _step(self, batch: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.program.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _state(model: Any) -> dict[str, torch.Tensor]:
    state = dict(model.state_dict())
    return {key: v.detach().clone() for key, v in state.items() if isinstance(v, torch.Tensor)}


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return tree_map(cast, batch)


def _without_draws(model: Any) -> Any:
    """Switches off what draws: every replica draws its own, so nothing would be comparable."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase) or hasattr(module, "drop_prob"):
            name = "dropout" if isinstance(module, nn.RNNBase) else "drop_prob"
            setattr(module, name, 0.0)
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
        if _has_own_forward(module):
            module.eval()  # with the running statistics: it cannot be converted
    return model


def _has_own_forward(module: nn.Module) -> bool:
    """Whether it is a batch normalisation that convert_sync_batchnorm refuses."""
    return isinstance(module, _BatchNorm) and type(module).forward not in (
        _BatchNorm.forward,
        mirror.nn.SyncBatchNorm.forward,
    )


def _describe(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
    return text[:160]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def images(size: int = 32, channels: int = 3, classes: int = 10) -> list[Any]:
    """Batches of images and labels."""
    g = generator()
    return [
        (
            torch.randn(n, channels, size, size, generator=g),
            torch.randint(classes, (n,), generator=g),
        )
        for n in SIZES
    ]


def vectors(*shape: int, targets: tuple[int, ...] = (1,)) -> list[Any]:
    """Batches of arrays and of what is to come out."""
    g = generator()
    return [
        (torch.randn(n, *shape, generator=g), torch.randn(n, *targets, generator=g)) for n in SIZES
    ]


def sequences(length: int = 12, vocabulary: int = 50) -> list[Any]:
    """Batches of tokens."""
    g = generator()
    return [torch.randint(1, vocabulary, (n, length), generator=g) for n in SIZES]


def classify(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def regress(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def silent() -> None:
    warnings.simplefilter("ignore")
