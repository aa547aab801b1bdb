"""A training program over somebody else's library, and how its results are compared with plain."""

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
CASES: dict[str, list["Case"]] = {}


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is trained.

    Attributes:
        make: returns the model; anything with parameters().
        batches: structures of tensors whose first dimension is the batch.
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
    """One line of the table. ``difference``: see ``difference``; ``ratio``: of step times."""

    library: str
    name: str
    way: int
    verdict: str
    difference: float | None = None
    ratio: float | None = None
    remark: str = ""
    loss: float = field(default=float("nan"))


def case(library: str, name: str, *, ways: Sequence[int] = (1, 3), remark: str = "") -> Any:
    """Registers a function that returns a Program; it imports the library itself."""

    def register(program: Callable[[], Program]) -> Callable[[], Program]:
        CASES.setdefault(library, []).append(Case(library, name, program, ways, remark))
        return program

    return register


def rows_of(case: Case) -> list[Row]:
    """Trains a case plainly and in each of its ways."""
    remarks = [case.remark] if case.remark else []
    try:
        program = case.program()
        plain, model, dtype = _plain(program)
    except Exception as error:
        return [
            Row(case.library, case.name, way, "not run", remark=_told(error)) for way in case.ways
        ]
    rows = []
    for way in case.ways:
        row = Row(case.library, case.name, way, "right")
        notes = list(remarks)
        try:
            trained = _mirrored(program, copy.deepcopy(model), way, dtype, notes)
            row.difference = difference(trained, plain)
            row.ratio = trained["seconds"] / plain["seconds"]
            if not row.difference < TOLERANCE[dtype]:
                row.verdict = "DIFFERS"
        except (mirror.errors.MirrorError, NotImplementedError) as error:
            row.verdict, notes = "refused", [_told(error)]
        except Exception as error:
            row.verdict, notes = "ERROR", [_told(error)]
        if dtype is torch.float32:
            notes.append("float32")
        row.remark = "; ".join(notes)
        rows.append(row)
    return rows


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
            return _trained(program, model, dtype, lambda step, batch: step(batch)), before, dtype
        except (RuntimeError, ValueError, TypeError):
            if dtype is torch.float32:
                raise
    raise AssertionError


def _mirrored(program: Program, model: Any, way: int, dtype: torch.dtype, notes: Any) -> Any:
    with mirror.MirroredStrategy(["cpu"] * NUM_REPLICAS) as strategy, strategy.scope():
        strategy.mirror(model)
        for module in model.modules():
            if isinstance(module, _BatchNorm) and not _has_own_forward(module):
                mirror.nn.convert_sync_batchnorm(module)
        if any(map(_has_own_forward, model.modules())):
            notes.append("its own batch norm in eval mode")

        def on_replicas(step: Any, batch: Any) -> Any:
            return strategy.reduce("mean", strategy.run(step, args=(batch,)))

        def split(step: Any, batch: Any) -> Any:
            (parts,) = strategy.distribute_dataset([batch])
            return on_replicas(step, parts)

        how = split if way == 3 else lambda step, batch: step(batch)
        result = _trained(program, model, dtype, how)
        strategy.check_replicas()
    return result


def _trained(program: Program, model: Any, dtype: torch.dtype, how: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = program.optimizer(parameters)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = program.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    first = _state(model)
    losses: list[float] = []
    seconds = float("inf")
    for _ in range(PASSES):
        begin = time.process_time()
        if program.loop is not None:
            losses += program.loop(model, optimizer, _cast(program.batches, dtype), program.loss)
        else:
            for batch in program.batches:
                losses.append(float(how(step, _cast(batch, dtype))))
                program.after(model)
        seconds = min(seconds, time.process_time() - begin)
    state = _state(model) | {k: v.detach().clone() for k, v in program.extra(model).items()}
    return {"losses": losses, "first": first, "state": state, "seconds": seconds}


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


def _told(error: Exception) -> str:
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
