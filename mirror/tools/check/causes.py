"""The likely cause of a difference, from the first event that differs.

first event that differs                          cause                    remedy
input of the model                                different data           one loader
another event than on one device                  another branch           pass the condition
output of a BatchNorm                             statistics per replica   SyncBatchNorm
output of Dropout, of a function that draws       random numbers           --no-dropout
a function of a tensor that replicas have apart   state outside the model  buffers, all_reduce
a number that differs between replicas            state outside the model  pass as an argument
a number that follows the part's size             size of the batch        all_reduce the size
the loss in run, an output that is one number     loss is no mean          per-example losses
any other function of tensors in a forward        mixes examples           outside, all_gather
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mirror.replica.exactness.local_losses import GATHER_FIRST, MIXES_EXAMPLES
from mirror.replica.params.buffer_differences import STATISTICS_OF_PARTS, USE_WHOLE_BATCH
from mirror.tools.check.check_result import CheckResult
from mirror.tools.check.differences import Difference, align, nearest_of
from mirror.tools.check.fingerprint import relative_distance
from mirror.tools.check.record import (
    GRADIENT,
    INPUT,
    LOSS,
    OP,
    OUTPUT,
    PARAMETER,
    PART,
    Record,
    RecordedEvent,
)

_GENERATORS = ("torch", "Python's random", "NumPy's random")
_CONTRACTING = frozenset("matmul mm bmm einsum cdist __matmul__ tensordot pdist linear".split())
_STATISTICS = frozenset("batch_norm instance_norm".split())
_SHOWN = 4  # the values of so many replicas are shown
_FEW_UNITS = 4 * 2.0**-23  # of float32


def diagnose_error(result: CheckResult, error: dict[str, Any]) -> CheckResult:
    """Fills in the cause of an error that the strategy raises, and one device does not."""
    message = error.get("message", "")
    result.line = error.get("line", "")
    if "modified by an inplace operation" in message:
        result.cause = "state kept outside the model"
        result.why = (
            "the replicas write in place to a tensor that they share, and the backward pass of "
            f"another one still needs it. {message}"
        )
        result.remedy = (
            "keep it as a buffer of the model (register_buffer), or write it outside forward"
        )
    elif "that no strategy mirrors" in message or "are not mirrored" in message:
        result.cause, result.why = "a parameter that was never mirrored", message
        result.remedy = (
            "make it an attribute of a module (nn.Parameter, nn.ParameterList, nn.ModuleList), so "
            "that it is among model.parameters()"
        )
    else:
        result.cause, result.why, result.remedy = "an error", message, _remedy_in(message)
    return result


def _remedy_in(message: str) -> str:
    """Returns what mirror's own messages say to do: what follows the last semicolon.

    Or the one before it, if several ways are named.
    """
    head, _, tail = message.rpartition("; ")
    if tail.startswith("or "):
        head, _, other = head.rpartition("; ")
        tail = f"{other}; {tail}" if head else tail
    return tail if head else "run it with mirror run to see the traceback"


def diagnose(
    result: CheckResult,
    found: Difference,
    inside: Difference | None,
    some: Sequence[RecordedEvent],
    others: Sequence[RecordedEvent],
    one: Record,
    many: Record,
) -> CheckResult:
    """Fills in the cause of a difference.

    Args:
        found: the first one outside modules.
        inside: the first one of that step, in modules or outside.
        some, others: the events of that step, on one device and under the strategy.
        one, many: the whole runs.
    """
    first = inside or found
    event = first.event
    if event.depth == 0 and event.kind == INPUT:
        return _explain_data(result, first, one, many)
    if event.kind == GRADIENT:
        first = _nearly_equal_loss(found, some, others) or first
        event = first.event
    result.module, result.line = _module_of(event, some), event.where
    result.module_class = _class_of(result.module, some)
    if event.kind == OP:
        result.operation = str(event.info.get("op", ""))
    if first.reason == "other" or event.info.get("op") == "branch":
        if found.event.kind == LOSS and not _has_replica_values(found.event):
            return _explain_kept_number(found, result)  # the outputs are equal all the same
        return _explain_branch(first, result)
    if event.info.get("norm") or result.operation in _STATISTICS:
        return _explain_statistics(result)
    if event.info.get("dropout") or event.info.get("random"):
        return _explain_random(result, "torch")
    drawn = _find_draws(event, some)
    if drawn and drawn != ["torch"]:
        return _explain_random(result, " and ".join(drawn))
    written = _find_write_outside(event, some, others)
    if written is not None:
        return _explain_state(result, written)
    source, is_product = _find_source(first, some, others)
    if not is_product and event.kind == OP and first.one is not None and first.many is not None:
        numbers = first.one.info.get("numbers")
        of_replicas = first.many.info.get("numbers_of_replicas")
        if of_replicas and any(n != numbers for n in of_replicas):
            return _explain_numbers(result, first.many, numbers, of_replicas)
    if event.kind == LOSS:
        return _explain_loss_in_run(first, result)
    if event.kind in (GRADIENT, PARAMETER):
        return _explain_gradient(first, result, others)
    if _is_loss(found, first, is_product):
        return _explain_loss_output(found, first, result, others)
    return _explain_mixing(result, source)


def _is_loss(found: Difference, first: Difference, is_product: bool) -> bool:
    """Whether an output of one number is wrong in what no example has for itself."""
    if found.event.kind not in (OUTPUT, GRADIENT) or is_product:
        return False
    if found.event.kind == OUTPUT and not _is_scalar(found.event):
        return False
    if _is_scalar(first.event):
        return True
    return first.many is not None and not _has_way(first.many, "cat", "interleaved")


def _is_scalar(event: RecordedEvent) -> bool:
    return bool(event.prints) and event.prints[0].shape == ()


def _has_way(event: RecordedEvent, *ways: str) -> bool:
    return any(way.startswith(ways) for way in event.ways)


def _nearly_equal_loss(
    found: Difference, some: Sequence[RecordedEvent], others: Sequence[RecordedEvent]
) -> Difference | None:
    """Returns the first 0-d value in forward that differs by a little more than rounding.

    The roots of the replicas' means nearly have the mean of the whole batch, and other gradients.
    """
    for i, a, c in align(some, others):
        if a is None or c is None or a.key != c.key or a is found.one:
            return None
        if a.depth == 0 or not _is_scalar(a) or "values_of_replicas" not in c.info:
            continue
        distance, nearest = nearest_of(a.prints[0], c)
        if nearest is not None and distance > _FEW_UNITS * a.prints[0].norm:
            return Difference(
                i, a, c, relative_distance(distance, a.prints[0].norm), print_many=nearest
            )
    return None


# Where it is


def _module_of(event: RecordedEvent, events: Sequence[RecordedEvent]) -> str:
    """Returns the module that makes an event."""
    if event.kind in (OP, OUTPUT):
        return event.name
    if event.kind == INPUT:
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
        if other.kind == INPUT:
            opened.append(other)
        elif other.kind == OUTPUT and opened:
            opened.pop()
    return opened


def _class_of(module: str, events: Sequence[RecordedEvent]) -> str:
    for event in events:
        if event.name == module and "class" in event.info:
            return str(event.info["class"])
    return ""


def _call_of(event: RecordedEvent, events: Sequence[RecordedEvent]) -> list[RecordedEvent]:
    """Returns the events of the outermost call that an event is in, up to the next call."""
    place = next((i for i, e in enumerate(events) if e is event), 0)
    begins = [i for i, e in enumerate(events) if e.depth == 0 and e.kind == INPUT]
    start = max((i for i in begins if i <= place), default=0)
    end = min((i for i in begins if i > place), default=len(events))
    return list(events[start:end])


def _find_draws(event: RecordedEvent, events: Sequence[RecordedEvent]) -> list[str]:
    """Returns the generators that the outermost call has drawn from, on one device."""
    call = [e for e in _call_of(event, events) if e.depth == 0 and e.info.get("rng")]
    if len(call) < 2:
        return []
    before, after = call[0].info["rng"], call[-1].info["rng"]
    names = zip(_GENERATORS, before, after, strict=False)
    return [name for name, some, other in names if some != other]


def _find_write_outside(
    event: RecordedEvent, some: Sequence[RecordedEvent], others: Sequence[RecordedEvent]
) -> RecordedEvent | None:
    """Returns where the call uses a tensor outside the model that its forward changes."""
    for other in _call_of(event, some):
        if other.info.get("writes_outside"):
            return other
        if other is event:
            break
    for one, many in zip(_call_of(event, some), _many_of_call(event, some, others), strict=False):
        if one.key != many.key:
            break
        sums = many.info.get("outside_of_replicas")
        if sums and any(each != one.info.get("outside") for each in sums):
            return one
        if one is event:
            break
    return None


def _many_of_call(
    event: RecordedEvent, some: Sequence[RecordedEvent], others: Sequence[RecordedEvent]
) -> Sequence[RecordedEvent]:
    """Returns the strategy's events of the same outermost call."""
    call = _call_of(event, some)
    start = next((i for i, e in enumerate(some) if call and e is call[0]), 0)
    number = sum(e.depth == 0 and e.kind == INPUT for e in some[:start])
    found = [i for i, e in enumerate(others) if e.depth == 0 and e.kind == INPUT]
    return others[found[number] :] if number < len(found) else ()


# What it is


def _explain_statistics(result: CheckResult) -> CheckResult:
    result.cause = "batch statistics per replica"
    result.why = STATISTICS_OF_PARTS.format(result.module_class or result.operation)
    result.remedy = USE_WHOLE_BATCH
    return result


def _explain_random(result: CheckResult, generator: str) -> CheckResult:
    result.cause = "random numbers"
    result.why = (
        f"forward draws from {generator}: each replica draws for its part, so the numbers are "
        "others than one device's, of the same distribution"
    )
    result.remedy = (
        "none is needed for training; to compare the rest, mirror check --no-dropout, or draw "
        "outside the model and pass the numbers as an argument"
    )
    return result


def _explain_numbers(
    result: CheckResult, event: RecordedEvent, one: Any, many: Sequence[Any]
) -> CheckResult:
    result.values = {"one device": one, "replicas": list(many[:_SHOWN])}
    counts = event.info.get("counts") or []
    if not _follows_size(one, many, counts):
        result.cause = "state kept outside the model"
        result.why = (
            "a Python number in forward differs between the replicas: a counter, a global or "
            "an attribute that every replica changes, or a value computed from its part"
        )
        result.remedy = (
            "change it once per step outside forward, or pass it as an argument; compute a value "
            "of the batch with mirror.get_replica_context().all_reduce"
        )
        return result
    result.cause = "depends on the size of the batch"
    result.why = (
        "a Python number in forward is computed from the size of the batch: a replica has that of "
        "its part, one device that of the whole batch"
    )
    result.remedy = (
        "compute it outside the model and pass it as an argument, or all_reduce('sum', ...) the "
        "number of examples"
    )
    return result


def _follows_size(one: Any, many: Sequence[Any], counts: Sequence[float]) -> bool:
    """Whether numbers may follow the size of a part; a counter begins as on one device."""
    by_count: dict[float, Any] = {}
    pairs = zip(many, counts, strict=False)
    is_function = all(by_count.setdefault(count, n) == n for n, count in pairs)
    return is_function and all(numbers != one for numbers in many)


def _explain_state(result: CheckResult, event: RecordedEvent) -> CheckResult:
    result.cause = "state kept outside the model"
    verb = "writes" if event.info.get("writes_outside") else "replaces"
    result.why = (
        f"forward {verb} a tensor that is no buffer of the model, used in {event.info.get('op')} "
        f"at {event.where}: the replicas share it, and each computes it from its own part"
    )
    result.remedy = (
        "register it as a buffer and compute it from values of all replicas "
        "(mirror.get_replica_context().all_reduce, all_gather), or update it outside forward"
    )
    result.module = event.name
    result.line = event.where or result.line
    return result


def _explain_branch(first: Difference, result: CheckResult) -> CheckResult:
    one, many = first.one, first.many
    result.cause = "takes another branch"
    of_one = f"{one.info.get('op') or one.name} at {one.where}" if one else "nothing"
    if many is not None and many.info.get("op") == "branch":
        of_many = "; ".join(many.info.get("branches", []))
    else:
        of_many = f"{many.info.get('op') or many.name} at {many.where}" if many else "nothing"
    result.values = {"one device": of_one, "replicas": of_many}
    result.why = (
        "forward branches on something that differs between a replica and one device: the size of "
        "its part, a value computed from it, a counter, or a random number"
    )
    result.remedy = (
        "branch on what is equal on all replicas: pass it as an argument, or all_reduce it first"
    )
    result.line = (many.where if many else "") or result.line
    return result


def _explain_loss_in_run(first: Difference, result: CheckResult) -> CheckResult:
    one, many = first.one, first.many
    result.cause = "a loss that is no mean over examples"
    values = many.info.get("values_of_replicas") if many else None
    if one is not None and one.prints and one.prints[0].shape == ():
        result.values["one device"] = _number(one.prints[0].values[0])
    if values:
        result.values["replicas"] = [_number(v) for v in values[:_SHOWN]]
        counts = (many.info.get("counts") if many else None) or [1.0] * len(values)
        total = sum(v * c for v, c in zip(values, counts, strict=False)) / sum(counts)
        result.values["they combine to"] = _number(total)
    result.why = (
        "the replicas' losses count with their examples, and their mean is not the loss of the "
        "whole batch"
    )
    result.remedy = (
        "compute the loss outside run, from gathered outputs; or from sums that "
        "mirror.get_replica_context().all_reduce('sum', ...) has made whole, before the root, "
        "quotient or logarithm"
    )
    return result


def _explain_gradient(
    first: Difference, result: CheckResult, events: Sequence[RecordedEvent]
) -> CheckResult:
    event = first.event
    result.module = event.name.rpartition(".")[0]
    result.line = ""
    losses = [e for e in events if e.kind == LOSS and e.info.get("values_of_replicas")]
    if losses:
        result.line = losses[0].where
        return _explain_loss_in_run(Difference(0, None, losses[0], 0.0), result)
    if event.name.startswith("parameter "):
        result.cause = "a parameter that was never mirrored"
        result.why = f"{event.name} of the optimizer belongs to no module that was called"
        result.remedy = "make it an attribute of a module (nn.Parameter, nn.ParameterList)"
        return result
    result.cause = f"another {event.kind}"
    result.why = (
        "outputs and losses are equal, and the gradients are not: a backward pass of its own (a "
        "custom Function, a hook, a penalty on gradients, an embedding with scale_grad_by_freq) "
        "mixes or counts examples"
    )
    result.remedy = "look at what backward does with this parameter; compute it outside run"
    return result


def _explain_loss_output(
    found: Difference, first: Difference, result: CheckResult, others: Sequence[RecordedEvent]
) -> CheckResult:
    result.cause = "a loss that is no mean over examples"
    name = found.event.name
    shown = [first.many, *(e for e in others if e.kind in (PART, OUTPUT) and e.name == name)]
    values = next(
        (e.info["values_of_replicas"] for e in shown if e and _has_replica_values(e)), None
    )
    if _is_scalar(first.event):
        result.values["one device"] = _number(first.event.prints[0].values[0])
    if values:
        result.values["replicas"] = [_number(v) for v in values[:_SHOWN]]
    result.why = (
        f"{result.operation or 'the output'} computes one number from a replica's part, and the "
        "mean of the replicas' numbers is not that of the whole batch"
    )
    result.remedy = (
        "return one value per example, or the outputs, and compute the loss outside the "
        "model; inside, all_reduce the sums before the root, quotient or logarithm"
    )
    return result


def _has_replica_values(event: RecordedEvent) -> bool:
    return bool(event.info.get("values_of_replicas"))


def _explain_kept_number(found: Difference, result: CheckResult) -> CheckResult:
    result.cause = "a loss that is no mean over examples"
    result.operation, result.line = "", found.event.where
    result.why = (
        "the model's outputs are those of one device, and the loss is not: it uses a number that "
        "forward keeps (as a load-balancing loss), which each replica computes from its part"
    )
    result.remedy = (
        "keep the probabilities, one row per example, and compute the number outside the model; "
        "or all_reduce the sums that it is computed from"
    )
    return result


def _explain_mixing(result: CheckResult, source: RecordedEvent | None) -> CheckResult:
    if source is not None:
        result.operation = str(source.info.get("op") or result.operation)
        result.line = source.where or result.line
    result.cause = "a forward that mixes examples"
    result.why = MIXES_EXAMPLES.format(result.operation or "its code")
    result.remedy = GATHER_FIRST
    return result


def _find_source(
    first: Difference, some: Sequence[RecordedEvent], others: Sequence[RecordedEvent]
) -> tuple[RecordedEvent | None, bool]:
    """Returns an earlier operation that compares examples with each other or reduces over them.

    A product of examples with each other has another shape on a part. A mean over the part is not
    wrong by itself; what is computed from it is.

    Returns:
        The event on one device, if there is one, and whether it is such a product.
    """
    if first.one is None or first.many is None:
        return None, False
    ones = [e for e in _events_until(some, first.one) if e.kind == OP]
    manys = [e for e in _events_until(others, first.many) if e.kind == OP]
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
                return a, True
        elif whole.is_float and whole.shape:
            ways = (w for w, p in zip(c.ways, c.prints, strict=False) if p is nearest)
            if next(ways, "") in ("mean", "sum"):
                found = a
    return found, False


def _events_until(events: Sequence[RecordedEvent], last: RecordedEvent) -> list[RecordedEvent]:
    """Returns the events of the same outermost call up to one."""
    found: list[RecordedEvent] = []
    for event in events:
        if event.depth == 0 and event.kind == INPUT:
            found = []
        found.append(event)
        if event is last:
            break
    return found


def _explain_data(
    result: CheckResult, first: Difference, one: Record, many: Record
) -> CheckResult:
    event = first.event
    result.cause, result.line = "different data", event.where
    result.remedy = (
        "make the loader once, with a generator of its own "
        "(DataLoader(generator=torch.Generator().manual_seed(0))), and sample by nothing that "
        "replicas or processes have apart"
    )
    whole = first.one.prints[0] if first.one is not None and first.one.prints else None
    if first.reason == "shape" and whole is not None and first.many is not None:
        shapes = [list(f.shape) for f in first.many.prints]
        result.values = {"one device": list(whole.shape), "replicas": shapes}
        result.why = "a batch of another size comes in"
    elif whole is not None and first.print_many is not None:
        if whole.has_same_rows(first.print_many):
            result.cause = "different order of data"
            result.why = "the same examples come in another order"
        else:
            result.why = "other examples come in"
    drew = _first_draw(first, one, many)
    if drew is not None:
        result.why += (
            f", because {drew[0]} has moved otherwise since step {drew[1].step}: forward draws "
            "from it, and a replica draws for its part only"
        )
        if drew[2]:
            result.line = drew[2]
        result.cause = "random numbers"
    return result


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
