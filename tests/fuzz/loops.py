"""The source of a loop with what happens between its steps, and of what is compared."""

from tests.fuzz import compiling, events

WAYS = (3, 1, 2)  # of uncompiled steps, in turn with compiled ones
_HOOKS = (
    "model.head.weight.register_hook(lambda g: g.clamp(-0.05, 0.05))",
    "model.stem.weight.register_hook(lambda g: g * 2)",
    "model.head.bias.register_hook(lambda g: None)",
    "model.head.weight.register_post_accumulate_grad_hook(halve_grad)",
    "model.head.register_forward_hook(lambda module, args, out: out * 0.9)",
    "model.head.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))",
    "model.head.register_full_backward_hook("
    "lambda module, gi, go: tuple(g if g is None else g * 0.5 for g in gi))",
    "model.head.register_full_backward_pre_hook(lambda module, go: (go[0] * 0.5,))",
    "optimizers[0].register_step_post_hook(lambda o, args, kwargs: halve(o))",
    "optimizers[0].register_step_pre_hook(lambda o, args, kwargs: slow_down(o))",
)


def loop(draft):
    k = draft.k
    ways = [draft.way] * draft.num_steps
    if draft.way == "mixed":
        ways = [k.whole(f"way {i}", 3) + 1 for i in range(draft.num_steps)]
    whole = draft.way in (2, 3) and k.maybe("whole dataset", 0.6)
    whole = whole and not (draft.compiles == "in turn" and k.choose("other way", WAYS) == 1)
    start, lines = [*draft.before_training, *_hooks(draft)], []
    start += ["evaluate = m.compiled_call(predict)"] * draft.is_compiled
    lines += _events(draft)
    way = ways[0] if draft.way != "mixed" else "ways[i]"
    if draft.way == "mixed":
        start.append(f"ways = {ways}")
    lines = [line.replace("WAY", str(way)) for line in lines]
    if draft.has_critic and draft.is_compiled:
        start.append("critic_step = m.compiled(critic_loss, critic_update)")
        lines.append("m.record('critic', critic_step(batch))")
    elif draft.has_critic:
        lines.append(f"m.record('critic', m.step({way}, critic_loss, critic_update, batch))")
    if draft.is_closed:
        lines.append(f"loss = m.call({way}, closed_step, batch)")
    elif draft.accumulates and k.maybe("no_sync", 0.6):
        lines.append("with m.no_sync() if i % 2 == 0 else contextlib.nullcontext():")
        lines += [f"    {line}" for line in _step(draft, way, start)]
    else:
        lines += _step(draft, way, start)
    lines.append('m.record("loss", loss)')
    if draft.scheduler:
        given = "loss.item()" if "Plateau" in draft.scheduler else ""
        lines.append(f"scheduler.step({given})")
    if draft.average == "deepcopy":
        lines.append("for a, b in zip(averaged.parameters(), model.parameters()):")
        lines.append("    a.data.lerp_(b.data.to(a.dtype), 0.3)")
    elif draft.average:
        lines.append("averaged.update_parameters(model)")
    if k.maybe("check every step", 0.5):
        lines.append("m.check()")
    dataset = f"m.batches(batches, {draft.way})" if whole else "batches"
    kinds = ("", "prefetch=0", f"weights={[1, 2, 1, 3, 1][: draft.n]}", "sharding='off'")
    options = k.choose("input", kinds)
    if whole and options and not draft.has("rows"):
        dataset = f"m.batches(batches, {draft.way}, {options})"
    leaves = k.choose("leaves early", (None, 1, 2), simplest=0.8)
    loop = [f"for i, batch in enumerate({dataset}):", *[f"    {line}" for line in lines]]
    if leaves is None or "save" in str(k):
        return [*start, *loop]
    start.append(f"dataset = {dataset}")
    loop[0] = "for i, batch in enumerate(dataset):"
    return [*start, loop[0], f"    if i == {leaves}: break", *loop[1:], *loop]


def _step(draft, way, start):
    """The lines that make one step; a compiled one takes turns with others."""
    plain = f"m.step({way}, loss_fn, update, batch)"
    if not draft.compiles:
        return [f"loss = {plain}"]
    start.append("compiled_step = m.compiled(loss_fn, update)")
    given = f", {draft.factor}" if draft.factor else ""
    if draft.compiles == "all":
        return [f"loss = compiled_step(batch{given})"]
    other = draft.k.choose("other way", WAYS)
    at = draft.k.choose("uncompiled at", (3, 4, 2))
    turn = f"i % {at} == {at} - 1"
    if given:
        return [
            f"loss = (m.step({other}, lambda b: loss_fn(b{given}), update, batch) if {turn}",
            f"        else compiled_step(batch{given}))",
        ]
    return [f"loss = m.step({other}, loss_fn, update, batch) if {turn} else compiled_step(batch)"]


def _hooks(draft):
    lines = []
    if not draft.sparse and not draft.is_closed and draft.k.maybe("hook", 0.15):
        # A compiled step refuses a hook that changes options.
        hooks = [hook for hook in _HOOKS if not (draft.compiles and "slow_down" in hook)]
        hook = draft.k.choose("which hook", hooks)
        if "halve(o)" in hook:
            lines = ["@torch.no_grad()", "def halve(o):",
                     "    for p in o.param_groups[0]['params']: p.mul_(0.99)", ""]  # fmt: skip
        elif "halve_grad" in hook:
            lines = ["def halve_grad(p):", "    p.grad.mul_(0.5)", ""]
        elif "slow" in hook:
            lines = ["def slow_down(o):",
                     "    for group in o.param_groups: group['lr'] *= 0.9", ""]  # fmt: skip
        lines.append(hook)
    return lines


def _events(draft):
    k, lines = draft.k, []
    pool = dict(events.ANY)
    if draft.sparse or draft.is_closed or (draft.has("flat") and draft.optimizer.is_sharp):
        pool.pop("backward between"), pool.pop("grads outside"), pool.pop("zero between")
    if "use_reentrant=True" in draft.model.source:  # refuses torch.autograd.grad
        pool.pop("grads outside", None)
    pool.pop("grads outside", None) if draft.containers != "tuple" else None
    if draft.of_workers and draft.has("rows"):  # statistics of a batch that each worker has whole
        pool.pop("backward between", None), pool.pop("grads outside", None)
    plain = not (draft.scheduler or draft.accumulates or draft.scaled)
    if plain:
        pool |= events.SAVING
    if draft.is_compiled:
        pool |= compiling.PLAIN_EVENTS
        pool |= {"checkpoint": compiling.CHECKPOINT} if plain else {}
    if plain and not draft.is_closed and draft.groups == "one":
        pool |= events.CHANGING
    if draft.has("lazy uncopied"):
        pool.pop("copy", None), pool.pop("rebuild", None)
    saving = {*events.SAVING, "checkpoint"}
    first = k.choose("event 0", (None, *pool), simplest=0.5)
    rest = [n for n in pool if n not in (events.CHANGING if first in saving else ())]
    if first in events.CHANGING:
        rest = [n for n in pool if n not in saving]
    names = [first, k.choose("event 1", (None, *rest), simplest=0.5)]
    if draft.is_compiled:
        more = [n for n in compiling.PLAIN_EVENTS if n in pool]
        names.append(k.choose("event 2", (None, *more), simplest=0.4))
    numbers = {"k": f"{k.whole('event k', 50)} % len(params())"}
    numbers["mode"] = k.choose("eval mode", ("no_grad", "inference_mode"))
    numbers["assign"] = k.choose("assign", (False, True))
    if draft.model.extra:
        lines += _event(draft, events.SKIP_EXTRA, numbers)
    for name in dict.fromkeys(filter(None, names)):
        lines += _event(draft, pool[name], numbers)
    return lines


def _event(draft, event, numbers):
    lines = []
    for step, statements in event:
        filled = list(statements)
        for name, value in numbers.items():
            filled = [line.replace("{" + name + "}", str(value)) for line in filled]
        if step == "all":
            lines += filled
        else:
            test = "i % 2 == 1" if step == "odd" else f"i == {step}"
            lines += [f"if {test}:", *[f"    {line}" for line in filled]]
    return lines


def end(draft):
    average = ["m.record('the critic', critic.state_dict())"] if draft.has_critic else []
    average += ["m.record('averaged', averaged.state_dict())"] if draft.average else []
    return [
        "m.record('gradients', {name: p.grad for name, p in model.named_parameters()})",
        "m.record('state', model.state_dict())",
        "m.record('optimizers', [o.state_dict() for o in optimizers])",
        "m.check()",
        *average,
        *(["m.record('scheduler', scheduler.get_last_lr())"] if draft.scheduler else []),
        *(["m.record('scale', scaler.get_scale())"] if draft.scaled else []),
        "model.eval()",
        "with torch.no_grad():",
        "    m.record('evaluation', predict(batches[0]))",
    ]
