"""The likely cause of a difference, from the first event that differs.

first event that differs                             cause                    remedy
input of the model                                   different data           one loader
an event of another kind than on one device          another branch           pass the condition
output of a BatchNorm                                statistics per replica   SyncBatchNorm
output of Dropout, or of a function that draws       random numbers           --no-dropout
an operation on a tensor that differs by replica     state outside the model  buffers, all_reduce
a Python number that differs between replicas        state outside the model  pass as an argument
a Python number that depends on the number of rows   size of the batch        all_reduce the size
the loss in run, or an output that is one number     loss is not a mean       per-example losses
any other operation in a forward                     mixes examples           outside, all_gather
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
_NORMS = frozenset("batch_norm instance_norm".split())
_MAX_SHOWN = 4  # replicas whose values are shown
_FEW_UNITS = 4 * 2.0**-23  # of float32


class _Cause(NamedTuple):
    """What a result says of one kind of difference; ``why`` may have a place for a name."""

    cause: str
    why: str
    remedy: str


_STATE = "state kept outside the model"
_LOSS = "a loss that is no mean over examples"
_UNMIRRORED = "a parameter that was never mirrored"
_STATISTICS = _Cause("batch statistics per replica", STATISTICS_OF_PARTS, USE_WHOLE_BATCH)
_MIXING = _Cause("a forward that mixes examples", MIXES_EXAMPLES, GATHER_FIRST)
_RANDOM = _Cause(
    "random numbers",
    "forward draws from {}: each replica draws for its own examples, so the values differ from "
    "one device's but have the same distribution",
    "training needs none; to compare the rest of the model, run mirror check --no-dropout, or "
    "draw outside the model and pass the values as an argument",
)
_COUNTER = _Cause(
    _STATE,
    "a Python number in forward differs between replicas: a counter, global or attribute that "
    "every replica changes, or a value that each replica computes from its own examples",
    "change the number once per step outside forward, or pass it as an argument; compute a value "
    "of the batch with mirror.get_replica_context().all_reduce",
)
_BATCH_SIZE = _Cause(
    "depends on the size of the batch",
    "a Python number in forward is computed from the size of the batch: each replica has its own "
    "number of examples, one device that of the whole batch",
    "compute the number outside the model and pass it as an argument, or all_reduce('sum', ...) "
    "the number of examples",
)
_TENSOR_OUTSIDE = _Cause(
    _STATE,
    "forward {} a tensor that is not a buffer of the model, used in {} at {}: all replicas share "
    "the tensor, and each computes its value from its own examples",
    "register the tensor as a buffer and compute it from values of all replicas "
    "(mirror.get_replica_context().all_reduce, all_gather), or update it outside forward",
)
_SHARED_TENSOR = _Cause(
    _STATE,
    "a replica writes in place to a tensor that all replicas share, while the backward pass of "
    "another replica still needs its old value. {}",
    "register the tensor as a buffer of the model (register_buffer), or write to it outside "
    "forward",
)
_BRANCH = _Cause(
    "takes another branch",
    "forward branches on a value that differs between a replica and one device: the number of "
    "examples, a value computed from them, a counter, or a random number",
    "branch on a value that is equal on all replicas: pass it as an argument, or all_reduce it "
    "first",
)
_LOSS_IN_RUN = _Cause(
    _LOSS,
    "each replica's loss is weighted by its number of examples, and this mean is not the loss of "
    "the whole batch",
    "compute the loss outside run, from gathered outputs; or all_reduce its sums with "
    "mirror.get_replica_context().all_reduce('sum', ...) before the root, quotient or logarithm",
)
_LOSS_OUTPUT = _Cause(
    _LOSS,
    "{} computes one number from a replica's examples, and the mean of the replicas' numbers is "
    "not the number of the whole batch",
    "return one value per example, or the outputs, and compute the loss outside the model; or "
    "all_reduce its sums inside before the root, quotient or logarithm",
)
_STORED_VALUE = _Cause(
    _LOSS,
    "the model's outputs equal one device's, but the loss differs: forward stores a value (for "
    "example a load-balancing loss) that each replica computes from its own examples",
    "store the probabilities, one row per example, and compute the value outside the model; or "
    "all_reduce the sums from which it is computed",
)
_NOT_CALLED = _Cause(
    _UNMIRRORED,
    "{} of the optimizer does not belong to a module that was called",
    "make it an attribute of a module (nn.Parameter, nn.ParameterList)",
)
_NOT_MIRRORED = _Cause(
    _UNMIRRORED,
    "{}",
    "make it an attribute of a module (nn.Parameter, nn.ParameterList, nn.ModuleList), so that "
    "model.parameters() contains it",
)
_BACKWARD = _Cause(
    "another gradient, or parameter",
    "outputs and losses are equal, but gradients differ: a custom backward (a Function, a hook, a "
    "gradient penalty, an embedding with scale_grad_by_freq) mixes or counts examples",
    "check how backward computes the gradient of this parameter; compute it outside run",
)


def _explain(result: CheckResult, found: _Cause, *names: object) -> CheckResult:
    """Fills in a cause; ``names`` go into its ``why``."""
    result.cause, result.why, result.remedy = found.cause, found.why.format(*names), found.remedy
    return result


def explain_error(result: CheckResult, error: dict[str, Any]) -> CheckResult:
    """Fills in the cause of an error that is raised under the strategy but not on one device."""
    message = error.get("message", "")
    result.line = error.get("line", "")
    if "modified by an inplace operation" in message:
        return _explain(result, _SHARED_TENSOR, message)
    if "that no strategy mirrors" in message or "are not mirrored" in message:
        return _explain(result, _NOT_MIRRORED, message)
    return _explain(result, _Cause("an error", "{}", _remedy_in(message)), message)


def _remedy_in(message: str) -> str:
    """Returns the remedy in a message of mirror: the text after the last semicolon.

    If that text begins with "or", the remedy begins after the semicolon before it.
    """
    head, _, remedy = message.rpartition("; ")
    if remedy.startswith("or "):
        head, _, alternative = head.rpartition("; ")
        remedy = f"{alternative}; {remedy}" if head else remedy
    return remedy if head else "run the script with mirror run to see the traceback"


def explain_difference(
    result: CheckResult,
    shallow: Difference,
    deep: Difference | None,
    one_events: Sequence[RecordedEvent],
    many_events: Sequence[RecordedEvent],
    one: Record,
    many: Record,
) -> CheckResult:
    """Fills in the cause of a difference.

    Args:
        shallow: the first difference outside modules.
        deep: the first difference of that step, inside modules or outside.
        one_events, many_events: the events of that step, on one device and under the strategy.
        one, many: the whole runs.
    """
    first = deep or shallow
    event = first.event
    if event.depth == 0 and event.kind == INPUT:
        return _explain_data(result, first, one, many)
    if event.kind == GRADIENT:
        first = _find_nearly_equal_loss(shallow, one_events, many_events) or first
        event = first.event
    result.module, result.line = _module_of(event, one_events), event.where
    result.module_class = _class_of(result.module, one_events)
    if event.kind == OP:
        result.operation = str(event.info.get("op", ""))
    if first.reason == "other" or event.info.get("op") == "branch":
        if shallow.event.kind == LOSS and not _has_replica_values(shallow.event):
            result.operation, result.line = "", shallow.event.where
            return _explain(result, _STORED_VALUE)  # the model's outputs are equal
        return _explain_branch(first, result)
    if event.info.get("norm") or result.operation in _NORMS:
        return _explain(result, _STATISTICS, result.module_class or result.operation)
    if event.info.get("dropout") or event.info.get("random"):
        return _explain(result, _RANDOM, "torch")
    drawn = _find_draws(event, one_events)
    if drawn and drawn != ["torch"]:
        return _explain(result, _RANDOM, " and ".join(drawn))
    written = _find_write_outside(event, one_events, many_events)
    if written is not None:
        return _explain_state(result, written)
    source, is_product = _find_source(first, one_events, many_events)
    if not is_product and event.kind == OP and first.one is not None and first.many is not None:
        numbers = first.one.info.get("numbers")
        of_replicas = first.many.info.get("numbers_of_replicas")
        if of_replicas and any(n != numbers for n in of_replicas):
            return _explain_numbers(result, first.many, numbers, of_replicas)
    if event.kind == LOSS:
        return _explain_loss_in_run(first, result)
    if event.kind in (GRADIENT, PARAMETER):
        return _explain_gradient(first, result, many_events)
    if _is_loss_output(shallow, first, is_product):
        return _explain_loss_output(shallow, first, result, many_events)
    return _explain_mixing(result, source)


def _is_loss_output(shallow: Difference, first: Difference, is_product: bool) -> bool:
    """Whether the model returns one number that is not a mean over examples."""
    if shallow.event.kind not in (OUTPUT, GRADIENT) or is_product:
        return False
    if shallow.event.kind == OUTPUT and not _is_scalar(shallow.event):
        return False
    if _is_scalar(first.event):
        return True
    return first.many is not None and not any(
        way.startswith(("cat", "interleaved")) for way in first.many.ways
    )


def _is_scalar(event: RecordedEvent) -> bool:
    return bool(event.prints) and event.prints[0].shape == ()


def _find_nearly_equal_loss(
    shallow: Difference, one_events: Sequence[RecordedEvent], many_events: Sequence[RecordedEvent]
) -> Difference | None:
    """Returns the first 0-d value in forward that differs by a little more than rounding.

    For example, the mean of the replicas' root mean squares is nearly that of the whole batch, but
    its gradients differ.
    """
    for i, a, c in align(one_events, many_events):
        if a is None or c is None or a.key != c.key or a is shallow.one:
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
    """Returns the module that produces an event; for an input, the module that passes it on."""
    if event.kind in (OP, OUTPUT):
        return event.name
    if event.kind != INPUT:
        return ""
    calling: list[str] = []  # the modules whose calls have begun, outermost first
    for earlier in events:
        if earlier is event:
            break
        if earlier.info.get("part", 0):
            continue
        if earlier.kind == INPUT:
            calling.append(earlier.name)
        elif earlier.kind == OUTPUT and calling:
            calling.pop()
    return calling[-1] if calling else event.name


def _class_of(module: str, events: Sequence[RecordedEvent]) -> str:
    for event in events:
        if event.name == module and "class" in event.info:
            return str(event.info["class"])
    return ""


def _call_of(event: RecordedEvent, events: Sequence[RecordedEvent]) -> list[RecordedEvent]:
    """Returns the events from the outermost call that contains an event, up to the next call."""
    index = next((i for i, e in enumerate(events) if e is event), 0)
    begins = [i for i, e in enumerate(events) if e.depth == 0 and e.kind == INPUT]
    start = max((i for i in begins if i <= index), default=0)
    end = min((i for i in begins if i > index), default=len(events))
    return list(events[start:end])


def _find_draws(event: RecordedEvent, events: Sequence[RecordedEvent]) -> list[str]:
    """Returns the generators from which the outermost call draws on one device."""
    call = [e for e in _call_of(event, events) if e.depth == 0 and e.info.get("rng")]
    if len(call) < 2:
        return []
    before, after = call[0].info["rng"], call[-1].info["rng"]
    states = zip(_GENERATORS, before, after, strict=False)
    return [name for name, state_before, state_after in states if state_before != state_after]


def _find_write_outside(
    event: RecordedEvent, one_events: Sequence[RecordedEvent], many_events: Sequence[RecordedEvent]
) -> RecordedEvent | None:
    """Returns the event where the call uses a tensor outside the model that forward changes."""
    call = _call_of(event, one_events)
    for earlier in call:
        if earlier.info.get("writes_outside"):
            return earlier
        if earlier is event:
            break
    for one, many in zip(call, _same_call_of_many(call, one_events, many_events), strict=False):
        if one.key != many.key:
            break
        sums = many.info.get("outside_of_replicas")
        if sums and any(each != one.info.get("outside") for each in sums):
            return one
        if one is event:
            break
    return None


def _same_call_of_many(
    call: Sequence[RecordedEvent],
    one_events: Sequence[RecordedEvent],
    many_events: Sequence[RecordedEvent],
) -> Sequence[RecordedEvent]:
    """Returns the strategy's events from the same outermost call on."""
    start = next((i for i, e in enumerate(one_events) if call and e is call[0]), 0)
    number = sum(e.depth == 0 and e.kind == INPUT for e in one_events[:start])
    begins = [i for i, e in enumerate(many_events) if e.depth == 0 and e.kind == INPUT]
    return many_events[begins[number] :] if number < len(begins) else ()


# What it is


def _explain_numbers(
    result: CheckResult, event: RecordedEvent, one: Any, many: Sequence[Any]
) -> CheckResult:
    result.values = {"one device": one, "replicas": list(many[:_MAX_SHOWN])}
    counts = event.info.get("counts") or []
    is_of_size = _follows_size(one, many, counts)
    return _explain(result, _BATCH_SIZE if is_of_size else _COUNTER)


def _follows_size(one: Any, many: Sequence[Any], counts: Sequence[float]) -> bool:
    """Whether the replicas' numbers may be a function of their numbers of examples.

    A counter may be one, too, but the first replica's equals that of one device.
    """
    by_count: dict[float, Any] = {}
    pairs = zip(many, counts, strict=False)
    is_function = all(by_count.setdefault(count, n) == n for n, count in pairs)
    return is_function and all(numbers != one for numbers in many)


def _explain_state(result: CheckResult, event: RecordedEvent) -> CheckResult:
    result.module = event.name
    result.line = event.where or result.line
    verb = "writes" if event.info.get("writes_outside") else "replaces"
    return _explain(result, _TENSOR_OUTSIDE, verb, event.info.get("op"), event.where)


def _explain_branch(first: Difference, result: CheckResult) -> CheckResult:
    one, many = first.one, first.many
    of_one = f"{one.info.get('op') or one.name} at {one.where}" if one else "nothing"
    if many is not None and many.info.get("op") == "branch":
        of_many = "; ".join(many.info.get("branches", []))
    else:
        of_many = f"{many.info.get('op') or many.name} at {many.where}" if many else "nothing"
    result.values = {"one device": of_one, "replicas": of_many}
    result.line = (many.where if many else "") or result.line
    return _explain(result, _BRANCH)


def _explain_loss_in_run(first: Difference, result: CheckResult) -> CheckResult:
    one, many = first.one, first.many
    values = many.info.get("values_of_replicas") if many else None
    if one is not None and one.prints and one.prints[0].shape == ():
        result.values["one device"] = _format_number(one.prints[0].values[0])
    if values:
        result.values["replicas"] = [_format_number(v) for v in values[:_MAX_SHOWN]]
        counts = (many.info.get("counts") if many else None) or [1.0] * len(values)
        total = sum(v * c for v, c in zip(values, counts, strict=False)) / sum(counts)
        result.values["they combine to"] = _format_number(total)
    return _explain(result, _LOSS_IN_RUN)


def _explain_gradient(
    first: Difference, result: CheckResult, many_events: Sequence[RecordedEvent]
) -> CheckResult:
    event = first.event
    result.module = event.name.rpartition(".")[0]
    result.line = ""
    losses = [e for e in many_events if e.kind == LOSS and e.info.get("values_of_replicas")]
    if losses:
        result.line = losses[0].where
        return _explain_loss_in_run(Difference(0, None, losses[0], 0.0), result)
    if event.name.startswith("parameter "):
        return _explain(result, _NOT_CALLED, event.name)
    return _explain(result, _BACKWARD._replace(cause=f"another {event.kind}"))


def _explain_loss_output(
    shallow: Difference,
    first: Difference,
    result: CheckResult,
    many_events: Sequence[RecordedEvent],
) -> CheckResult:
    name = shallow.event.name
    outputs = [
        first.many,
        *(e for e in many_events if e.kind in (PART, OUTPUT) and e.name == name),
    ]
    values = next(
        (e.info["values_of_replicas"] for e in outputs if e and _has_replica_values(e)), None
    )
    if _is_scalar(first.event):
        result.values["one device"] = _format_number(first.event.prints[0].values[0])
    if values:
        result.values["replicas"] = [_format_number(v) for v in values[:_MAX_SHOWN]]
    return _explain(result, _LOSS_OUTPUT, result.operation or "the output")


def _has_replica_values(event: RecordedEvent) -> bool:
    return bool(event.info.get("values_of_replicas"))


def _explain_mixing(result: CheckResult, source: RecordedEvent | None) -> CheckResult:
    if source is not None:
        result.operation = str(source.info.get("op") or result.operation)
        result.line = source.where or result.line
    return _explain(result, _MIXING, result.operation or "its code")


def _find_source(
    first: Difference, one_events: Sequence[RecordedEvent], many_events: Sequence[RecordedEvent]
) -> tuple[RecordedEvent | None, bool]:
    """Returns an earlier operation that compares examples with each other or reduces over them.

    A product of examples with each other has another shape on a replica. A mean over a replica's
    examples is not wrong by itself; the operation that differs is computed from it.

    Returns:
        The event on one device, if there is one, and whether it is such a product.
    """
    if first.one is None or first.many is None:
        return None, False
    ops = [e for e in _events_until(one_events, first.one) if e.kind == OP]
    ops_of_many = [e for e in _events_until(many_events, first.many) if e.kind == OP]
    reduction = None
    for a, c in zip(ops, ops_of_many, strict=False):
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
                reduction = a
    return reduction, False


def _events_until(events: Sequence[RecordedEvent], last: RecordedEvent) -> list[RecordedEvent]:
    """Returns the events of an outermost call up to the given one."""
    call: list[RecordedEvent] = []
    for event in events:
        if event.depth == 0 and event.kind == INPUT:
            call = []
        call.append(event)
        if event is last:
            break
    return call


def _explain_data(
    result: CheckResult, first: Difference, one: Record, many: Record
) -> CheckResult:
    event = first.event
    result.cause, result.line = "different data", event.where
    result.remedy = (
        "make the loader once, with a generator of its own "
        "(DataLoader(generator=torch.Generator().manual_seed(0))); sampling must not depend on "
        "the replica or process"
    )
    whole = first.one.prints[0] if first.one is not None and first.one.prints else None
    if first.reason == "shape" and whole is not None and first.many is not None:
        shapes = [list(f.shape) for f in first.many.prints]
        result.values = {"one device": list(whole.shape), "replicas": shapes}
        result.why = "the batch size differs"
    elif whole is not None and first.print_many is not None:
        if whole.has_same_rows(first.print_many):
            result.cause = "different order of data"
            result.why = "same examples, different order"
        else:
            result.why = "different examples"
    drew = _first_draw(first, one, many)
    if drew is not None:
        result.why += (
            f", because {drew[0]} has another state since step {drew[1].step}: forward draws from "
            "it, and each replica draws for its own examples only"
        )
        if drew[2]:
            result.line = drew[2]
        result.cause = "random numbers"
    return result


def _first_draw(
    first: Difference, one: Record, many: Record
) -> tuple[str, RecordedEvent, str] | None:
    """Returns the generator that differs at the input, since when, and a drawing line."""
    one_events = [e for e in one.events if e.depth == 0 and e.info.get("rng")]
    many_events = [e for e in many.events if e.depth == 0 and e.info.get("rng")]
    for a, c in zip(one_events, many_events, strict=False):
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


def _format_number(value: Any) -> str:
    return f"{float(value):.6g}"
