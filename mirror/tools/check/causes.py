"""Causes: what makes replicas differ from one device, by the first event that differs.

first difference                                cause                    remedy
output of a BatchNorm                           statistics per replica   SyncBatchNorm
output of Dropout, of a function that draws     random numbers           --no-dropout
a number that differs between replicas          state outside the model  buffers, run
a number that is another on all replicas        depends on batch size    whole batch
any other function of tensors in a forward      mixes examples           outside, all_gather
the same, which leaves one number               loss is no mean          per-example losses
the loss in run                                 loss is no mean          reduce first
the input                                       different data           one loader
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mirror.tools.check.compare import Difference, nearest_of
from mirror.tools.check.record import (
    ENTER,
    EXIT,
    GRADIENT,
    LOSS,
    OP,
    PARAMETER,
    PART,
    Record,
    RecordedEvent,
)

_GENERATORS = ("torch", "Python's random", "NumPy's random")
_CONTRACTING = frozenset("matmul mm bmm einsum cdist __matmul__ tensordot pdist linear".split())
_STATISTICS = frozenset("batch_norm instance_norm".split())
_SHOWN = 4  # replicas whose values are shown


@dataclass
class Finding:
    """What is told of a difference; see ``CheckVerdict``."""

    cause: str = ""
    why: str = ""
    remedy: str = ""
    module: str = ""
    module_class: str = ""
    operation: str = ""
    line: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def diagnose_error(error: dict[str, Any]) -> Finding:
    """Returns the cause of an error that the strategy raises, and one device does not."""
    message = error.get("message", "")
    line = error.get("line", "")
    if "modified by an inplace operation" in message:
        return Finding(
            "state kept outside the model",
            "the replicas write in place to a tensor that they share, and the backward pass of "
            f"another one still needs it. {message}",
            "keep it as a buffer of the model (register_buffer), or write it outside of forward",
            line=line,
        )
    if "trained in run" in message or "not mirrored" in message or "unmirrored" in message:
        return Finding(
            "a parameter that was never mirrored",
            message,
            "make it an attribute of a module (nn.Parameter, nn.ParameterList, nn.ModuleList), so "
            "that it is among model.parameters()",
            line=line,
        )
    return Finding("an error", message, _remedy_in(message), line=line)


def _remedy_in(message: str) -> str:
    """Returns what mirror's own messages say to do: what follows the last semicolon."""
    head, _, tail = message.rpartition("; ")
    return tail if head else "run it with mirror run to see the traceback"


def diagnose(
    found: Difference,
    inside: Difference | None,
    some: Sequence[RecordedEvent],
    others: Sequence[RecordedEvent],
    one: Record,
    many: Record,
) -> Finding:
    """Returns the cause of a difference.

    Args:
        found: the first one outside modules.
        inside: the first one of that step, in modules or outside.
        some, others: the events of that step, on one device and under the strategy.
        one, many: the whole runs.
    """
    first = inside or found
    event = first.event
    if event.depth == 0 and event.kind == ENTER:
        return _of_data(first, one, many)
    finding = Finding(module=_module_of(event, some), line=event.where)
    finding.module_class = _class_of(finding.module, some)
    if event.kind == OP:
        finding.operation = str(event.info.get("op", ""))
    drawn = _drawn_in(event, some)
    wrote = _writes_outside(event, some)
    if first.reason == "other" or event.info.get("op") == "parted":
        return _of_other_way(first, finding)
    if event.info.get("norm") or finding.operation in _STATISTICS:
        return _of_statistics(finding)
    if event.info.get("dropout") or event.info.get("random"):
        return _of_random(finding, "torch")
    if len(drawn) and drawn != ["torch"]:
        return _of_random(finding, " and ".join(drawn))
    if event.kind == OP and first.one is not None and first.many is not None:
        numbers = first.one.info.get("numbers")
        of_replicas = first.many.info.get("numbers_of_replicas")
        if of_replicas and any(n != numbers for n in of_replicas):
            return _of_numbers(finding, numbers, of_replicas)
    if wrote is not None:
        return _of_state(finding, wrote)
    if event.kind == LOSS:
        return _of_loss_in_run(first, finding)
    if event.kind in (GRADIENT, PARAMETER):
        return _of_gradient(first, finding, others)
    return _of_mixing(first, finding, some, others)


# Where it is


def _module_of(event: RecordedEvent, events: Sequence[RecordedEvent]) -> str:
    """Returns the module whose code makes an event."""
    if event.kind in (OP, EXIT):
        return event.name
    if event.kind == ENTER:
        opened = [e.name for e in _open_before(event, events)]
        return opened[-1] if opened else event.name
    return ""


def _open_before(event: RecordedEvent, events: Sequence[RecordedEvent]) -> list[RecordedEvent]:
    """Returns the calls of modules that an event is inside of, outermost first."""
    opened: list[RecordedEvent] = []
    for other in events:
        if other is event:
            break
        if other.info.get("part", 0):
            continue
        if other.kind == ENTER:
            opened.append(other)
        elif other.kind == EXIT and opened:
            opened.pop()
    return opened


def _class_of(module: str, events: Sequence[RecordedEvent]) -> str:
    for event in events:
        if event.name == module and "class" in event.info:
            return str(event.info["class"])
    return ""


def _call_of(event: RecordedEvent, events: Sequence[RecordedEvent]) -> list[RecordedEvent]:
    """Returns the events of the outermost call that an event is in."""
    call: list[RecordedEvent] = []
    is_inside = False
    for other in events:
        if other.depth == 0:
            if other.kind == ENTER and not is_inside:
                call = []
            is_inside = False
        call.append(other)
        if other is event:
            is_inside = True
        if is_inside and other.depth == 0 and other.kind == EXIT:
            break
    start = next((i for i, e in enumerate(events) if e is event), 0)
    for other in events[start + 1 :]:
        if other.depth == 0 and other.kind == ENTER:
            break
        call.append(other)
    return call


def _drawn_in(event: RecordedEvent, events: Sequence[RecordedEvent]) -> list[str]:
    """Returns the generators that the outermost call has drawn from, on one device."""
    call = [e for e in _call_of(event, events) if e.depth == 0 and e.info.get("rng")]
    if len(call) < 2:
        return []
    before, after = call[0].info["rng"], call[-1].info["rng"]
    names = zip(_GENERATORS, before, after, strict=False)
    return [name for name, some, other in names if some != other]


def _writes_outside(event: RecordedEvent, events: Sequence[RecordedEvent]) -> RecordedEvent | None:
    """Returns where the call writes a tensor that is kept outside the model."""
    return next((e for e in _call_of(event, events) if e.info.get("writes_outside")), None)


# What it is


def _of_statistics(finding: Finding) -> Finding:
    finding.cause = "batch statistics per replica"
    finding.why = (
        f"{finding.module_class or finding.operation} normalises with mean and variance of its "
        "replica's part of the batch, and one device with those of the whole batch"
    )
    finding.remedy = (
        "mirror.nn.convert_sync_batchnorm(model), or mirror run --sync-batch-norm for the "
        "unchanged script"
    )
    return finding


def _of_random(finding: Finding, generator: str) -> Finding:
    finding.cause = "random numbers"
    finding.why = (
        f"forward draws from {generator}: each replica draws for its part, so the numbers are "
        "others than one device's, of the same distribution"
    )
    finding.remedy = (
        "none is needed for training; to compare the rest, mirror check --no-dropout, or draw "
        "outside of the model and pass the numbers as an argument"
    )
    return finding


def _of_numbers(finding: Finding, one: Any, many: Sequence[Any]) -> Finding:
    finding.values = {"one device": one, "replicas": list(many[:_SHOWN])}
    if any(numbers != many[0] for numbers in many):
        finding.cause = "state kept outside the model"
        finding.why = (
            "a Python number in forward is not the same on all replicas: a counter, a global or "
            "an attribute that every replica changes, or a value computed of its part"
        )
        finding.remedy = (
            "change it once per step outside of forward, or pass it as an argument; a value of "
            "the batch needs mirror.get_replica_context().all_reduce"
        )
        return finding
    finding.cause = "depends on the size of the batch"
    finding.why = (
        "a Python number in forward is computed of the batch: a replica has its part's, one "
        "device the whole batch's"
    )
    finding.remedy = (
        "compute it outside of the model and pass it as an argument, or all_reduce('sum', ...) "
        "the number of examples"
    )
    return finding


def _of_state(finding: Finding, wrote: RecordedEvent) -> Finding:
    finding.cause = "state kept outside the model"
    finding.why = (
        f"forward writes a tensor that is no buffer of the model ({wrote.info.get('op')} at "
        f"{wrote.where}): the replicas share it, and each writes of its own part"
    )
    finding.remedy = (
        "register it as a buffer and compute it of values of all replicas "
        "(mirror.get_replica_context().all_reduce, all_gather), or write it outside of forward"
    )
    finding.line = wrote.where or finding.line
    return finding


def _of_other_way(first: Difference, finding: Finding) -> Finding:
    one, many = first.one, first.many
    finding.cause = "takes another way through the code"
    of_one = f"{one.info.get('op') or one.name} at {one.where}" if one else "nothing"
    if many is not None and many.info.get("op") == "parted":
        of_many = "; ".join(many.info.get("ways", []))
    else:
        of_many = f"{many.info.get('op') or many.name} at {many.where}" if many else "nothing"
    finding.values = {"one device": of_one, "replicas": of_many}
    finding.why = (
        "forward branches on something that a replica has otherwise than one device: the size of "
        "its part, a value computed of it, a counter, or a random number"
    )
    finding.remedy = (
        "branch on what all replicas have alike: pass it as an argument, or all_reduce it first"
    )
    finding.line = (many.where if many else "") or finding.line
    return finding


def _of_loss_in_run(first: Difference, finding: Finding) -> Finding:
    one, many = first.one, first.many
    finding.cause = "a loss that is no mean over examples"
    values = many.info.get("values_of_replicas") if many else None
    if one is not None and one.prints and one.prints[0].shape == ():
        finding.values["one device"] = _number(one.prints[0].values[0])
    if values:
        finding.values["replicas"] = [_number(v) for v in values[:_SHOWN]]
        counts = (many.info.get("counts") if many else None) or [1.0] * len(values)
        total = sum(v * c for v, c in zip(values, counts, strict=False)) / sum(counts)
        finding.values["they combine to"] = _number(total)
    finding.why = (
        "the replicas' losses count with their examples, and their mean is not the loss of the "
        "whole batch"
    )
    finding.remedy = (
        "compute the loss outside of run, of gathered outputs; or from sums that "
        "mirror.get_replica_context().all_reduce('sum', ...) has made whole, before the root, "
        "quotient or logarithm"
    )
    return finding


def _of_gradient(first: Difference, finding: Finding, events: Sequence[RecordedEvent]) -> Finding:
    event = first.event
    finding.module = event.name.rpartition(".")[0]
    finding.line = ""
    losses = [e for e in events if e.kind == LOSS and e.info.get("values_of_replicas")]
    if losses:
        found = _of_loss_in_run(Difference(0, None, losses[0], 0.0), finding)
        found.line = losses[0].where
        return found
    if event.name.startswith("parameter "):
        finding.cause = "a parameter that was never mirrored"
        finding.why = f"{event.name} of the optimizer belongs to no module that was called"
        finding.remedy = "make it an attribute of a module (nn.Parameter, nn.ParameterList)"
        return finding
    finding.cause = f"another {event.kind}"
    finding.why = (
        "outputs and losses are equal, and the gradients are not: a backward pass of its own (a "
        "custom Function, a hook, a penalty on gradients) mixes or counts examples"
    )
    finding.remedy = "look at what backward does with this parameter; compute it outside of run"
    return finding


def _of_mixing(
    first: Difference,
    finding: Finding,
    some: Sequence[RecordedEvent],
    others: Sequence[RecordedEvent],
) -> Finding:
    event = first.event
    source = _source(first, some, others)
    if source is not None:
        finding.operation = str(source.info.get("op") or finding.operation)
        finding.line = source.where or finding.line
    whole = event.prints[0] if event.prints else None
    values = first.many.info.get("values_of_replicas") if first.many else None
    part = next((e for e in others if e.kind == PART and e.name == event.name), None)
    if values is None and part is not None:
        values = part.info.get("values_of_replicas")
    is_loss = whole is not None and whole.shape == ()
    if is_loss and source is None:
        finding.cause = "a loss that is no mean over examples"
        finding.values["one device"] = _number(whole.values[0]) if whole is not None else ""
        if values:
            finding.values["replicas"] = [_number(v) for v in values[:_SHOWN]]
        finding.why = (
            f"{finding.operation or 'the output'} makes one number of a replica's part, and the "
            "replicas' numbers do not combine to that of the whole batch"
        )
        finding.remedy = (
            "return one value per example, or the outputs, and compute the loss outside of the "
            "model; inside, all_reduce the sums before the root, quotient or logarithm"
        )
        return finding
    finding.cause = "a forward that mixes examples"
    finding.why = (
        f"{finding.operation or 'its code'} computes over the examples of the batch, and a "
        "replica has only those of its part"
    )
    finding.remedy = (
        "compute it outside of the model, of the joined outputs; or gather first inside, with "
        "mirror.get_replica_context().all_gather(value)"
    )
    return finding


def _source(
    first: Difference, some: Sequence[RecordedEvent], others: Sequence[RecordedEvent]
) -> RecordedEvent | None:
    """Returns an earlier operation, which compares examples or reduces over them.

    A product of examples with each other has another shape on a part, and a mean over the part
    is not wrong by itself: both show in what is made of them.
    """
    if first.one is None or first.many is None:
        return None
    ones = [e for e in _until(some, first.one) if e.kind == OP]
    manys = [e for e in _until(others, first.many) if e.kind == OP]
    found = None
    for a, c in zip(ones, manys, strict=False):
        if a.key != c.key or not a.prints or a is first.one:
            continue
        whole = a.prints[0]
        _, nearest = nearest_of(whole, c)
        if nearest is None:
            batch = sum(c.info.get("counts", [0.0]))
            is_square = sum(size == batch for size in whole.shape) > 1
            if whole.is_float and (is_square or a.info.get("op") in _CONTRACTING):
                return a
            continue
        way = c.ways[c.prints.index(nearest)] if len(c.ways) == len(c.prints) else ""
        if way in ("mean", "sum") and len(whole.shape) and whole.is_float:
            found = a
    return found


def _until(events: Sequence[RecordedEvent], last: RecordedEvent) -> list[RecordedEvent]:
    """Returns the events of the same outermost call up to one."""
    found: list[RecordedEvent] = []
    for event in events:
        if event.depth == 0 and event.kind == ENTER:
            found = []
        found.append(event)
        if event is last:
            break
    return found


def _of_data(first: Difference, one: Record, many: Record) -> Finding:
    event = first.event
    finding = Finding(line=event.where, cause="different data")
    finding.remedy = (
        "make the loader once, with a generator of its own "
        "(DataLoader(generator=torch.Generator().manual_seed(0))), and sample by nothing that "
        "replicas or processes have apart"
    )
    whole = first.one.prints[0] if first.one is not None and first.one.prints else None
    if first.reason == "shape" and whole is not None and first.many is not None:
        shapes = [list(f.shape) for f in first.many.prints]
        finding.values = {"one device": list(whole.shape), "replicas": shapes}
        finding.why = "a batch of another size comes in"
    elif whole is not None and first.print_many is not None:
        if whole.has_same_rows(first.print_many):
            finding.cause = "different order of data"
            finding.why = "the same examples come in another order"
        else:
            finding.why = "other examples come in"
    drew = _first_draw(first, one, many)
    if drew is not None:
        finding.why += (
            f", because {drew[0]} has moved otherwise since step {drew[1].step}: forward draws "
            "from it, and a replica draws for its part only"
        )
        if drew[2]:
            finding.line = drew[2]
        finding.cause = "random numbers"
    return finding


def _first_draw(
    first: Difference, one: Record, many: Record
) -> tuple[str, RecordedEvent, str] | None:
    """Returns the generator that differs at the input, since when, and a line that drew."""
    ones = [e for e in one.events if e.depth == 0 and e.info.get("rng")]
    manys = [e for e in many.events if e.depth == 0 and e.info.get("rng")]
    for a, c in zip(ones, manys, strict=False):
        if a.info["rng"] != c.info["rng"]:
            pairs = zip(_GENERATORS, a.info["rng"], c.info["rng"], strict=True)
            name = next(n for n, x, y in pairs if x != y)
            drawn = (
                e.where
                for e in one.events
                if e.step <= a.step and (e.info.get("random") or e.info.get("dropout"))
            )
            return name, a, next(drawn, "")
        if a is first.one:
            break
    return None


def _number(value: Any) -> str:
    return f"{float(value):.6g}"
