"""The source of a step: forward, loss, backward, what is done to gradients, update."""

from tests.fuzz.compiling import COLLECTIVES
from tests.fuzz.optimizers import GRADIENT_EDITS

CRITIC_STEP = [
    "def critic_loss(batch):",
    "    y = torch.as_tensor(batch['y'] if isinstance(batch, dict) else batch[1])",
    "    real = critic(torch.eye(3, device=y.device)[y])",
    "    return critic(predict(batch).detach()).mean() - real.mean()",
    "",
    "def critic_update(loss):",
    "    critic_optimizer.zero_grad()",
    "    loss.backward()",
    "    critic_optimizer.step()",
    "",
]


def steps(draft):
    unpack = {
        "tuple": "x, y, z = batch",
        "dict": 'x, y, z = batch["x"], batch["y"], batch["z"]',
        "data.Pair": "x, y, z = batch.x, batch.y, batch.z",
    }[draft.containers]
    arrays = ["x, y, z = map(torch.as_tensor, (x, y, z))"] if draft.as_numpy else []
    call = draft.k.choose("second by", ("model(x, z)", "model(x, z=z)"))
    call = call if draft.has("second input") else "model(x)"
    out = {"plain": "", "tuple": "[0]", "dict": '["out"]', "dataclass": ".hidden"}
    out = out[draft.model.output]
    functions = [
        "",
        "def params():",
        "    return list(model.parameters())",
        "",
        "def grads():",
        "    return [p.grad for p in model.parameters()]",
        "",
        "def predict(batch):",
        f"    {unpack}",
        *[f"    {line}" for line in arrays],
        f"    return {call}{out}",
        "",
        "def loss_fn(batch, factor=1.0):",
        f"    {unpack}",
        *[f"    {line}" for line in arrays],
        *[f"    {line}" for line in _loss(draft, call, out)],
        "    return loss * factor" if draft.factor else "    return loss",
        "",
    ]
    functions += CRITIC_STEP if draft.has_critic else []
    functions += _closed(draft) if draft.is_closed else _update(draft)
    return functions


def _loss(draft, call, out):
    k, lines = draft.k, []
    penalty = (
        draft.model.data != "tok"
        and not draft.has("once half fp16 rows")
        and not draft.autocast
        and k.maybe("gradient penalty", 0.08)
    )
    if penalty:
        lines.append("x = x.detach().requires_grad_()")
    if draft.autocast:
        lines.append("with torch.autocast(m.device.type, dtype=torch.bfloat16):")
        lines.append(f"    result = {call}")
    else:
        lines.append(f"result = {call}")
    lines.append(f"out = result{out}")
    kinds = ["F.cross_entropy(out, y)", "nn.CrossEntropyLoss()(out, y)",
             "F.mse_loss(out, torch.eye(3, dtype=out.dtype, device=y.device)[y])",
             "F.cross_entropy(out, y, label_smoothing=0.1)"]  # fmt: skip
    if draft.way == 1 and not draft.of_workers:
        kinds += ["F.cross_entropy(out, y, reduction='sum') / 10",
                  "F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 0.5], "
                  "device=out.device, dtype=out.dtype))"]  # fmt: skip
    if draft.model.per_token:
        lines.append("m.weigh((y >= 0).sum())")
        lines.append("loss = F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-1)")
    elif draft.reduction == "sum":
        lines.append("loss = m.average(F.cross_entropy(out, y, reduction='none'))")
    else:
        lines.append("loss = " + k.choose("loss", kinds))
    by_example = draft.reduction == "mean" and not draft.model.per_token
    aux = {"plain": "", "tuple": "result[1]", "dict": 'result["aux"]',
           "dataclass": "result.gates[0]"}[draft.model.output]  # fmt: skip
    if aux and by_example and k.maybe("auxiliary loss", 0.5):
        lines.append(f"loss = loss + 0.1 * {aux}")
    if penalty and by_example:
        lines.append("(slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)")
        lines.append("loss = loss + 0.1 * slope.square().flatten(1).sum(1).mean()")
    if draft.is_compiled and draft.reduction == "mean":
        terms = [term for term in COLLECTIVES if by_example or "(out *" not in term]
        lines += filter(None, [k.choose("collective", ("", *terms), simplest=0.7)])
    if draft.has_critic:
        lines.append("loss = loss - 0.1 * critic(out).mean()")
    if not draft.sparse and k.maybe("l2", 0.1):
        total = "sum(p.abs().square().sum() for p in model.parameters())"
        if draft.has("half fp16"):
            total = "sum(p.double().square().sum() for p in model.parameters())"
        lines.append(f"loss = loss + m.regularization(0.01 * {total})")
    return lines


def _zero(draft):
    placed = ("for o in optimizers: o.zero_grad()", "model.zero_grad()",
              "for o in optimizers: o.zero_grad(set_to_none=False)",
              "for p in model.parameters(): p.grad = None")  # fmt: skip
    zero = draft.k.choose("zero", placed, simplest=0.4)
    return placed[0] if draft.sparse else zero


def _edits(draft):
    lines = [draft.clip] if draft.clip else []
    if not draft.sparse and draft.k.maybe("gradient edit", 0.2):
        edits = GRADIENT_EDITS[1:] if draft.compiles else GRADIENT_EDITS  # the first asks
        edit = draft.k.choose("which edit", edits)
        if draft.has("sparse"):
            edit = GRADIENT_EDITS[0]
        at = draft.k.whole("edited", 50)
        lines += [f"p = params()[{at} % len(params())]", edit]
    return lines


def _after(draft):
    if draft.has("complex") or not draft.k.maybe("constraint", 0.06):
        return []
    kinds = (
        "for p in model.parameters(): p.data.clamp_(-0.7, 0.7)",
        "for p in model.parameters(): p.detach().clamp_(-0.7, 0.7)",
        "with torch.no_grad(): model.head.weight.copy_(model.head.weight * 0.99)",
        "nn.utils.vector_to_parameters(0.99 * nn.utils.parameters_to_vector("
        "model.head.parameters()), model.head.parameters())",
    )
    return [draft.k.choose("which constraint", kinds)]


def _update(draft):
    k, zero = draft.k, _zero(draft)
    when = k.choose("zero when", ("before backward", "after step"))
    lines = [zero] if when == "before backward" and not draft.accumulates else []
    if draft.scaled:
        bad = k.choose("inf at", (None, 1, 2), simplest=0.5)
        loss = "loss" if bad is None else f'loss * float("inf") if i == {bad} else loss'
        lines.append(f"scaler.scale({loss}).backward()")
        edits = _edits(draft)
        if edits:
            lines += ["scaler.unscale_(optimizers[0])", *edits]
        lines += ["scaler.step(optimizers[0])", "scaler.update()"]
    else:
        twice = not draft.has("once") and k.maybe("two backwards", 0.06)
        part = " / 2" if draft.accumulates else ""
        if twice:
            lines.append(f"(0.3 * loss{part}).backward(retain_graph=True)")
            lines.append(f"(0.7 * loss{part}).backward()")
        else:
            lines.append(f"(loss{part}).backward()" if part else "loss.backward()")
        if draft.accumulates:
            lines += ["if i % 2 == 0:", "    return"]
        lines += [*_edits(draft), "for o in optimizers: o.step()"]
    lines += _after(draft)
    if when == "after step" or draft.accumulates:
        lines.append(zero)
    return ["def update(loss):", *[f"    {line}" for line in lines], ""]


def _closed(draft):
    # LBFGS without a line search goes astray, exponentially, where gradients are not the loss's.
    edits = [] if draft.optimizer.name == "LBFGS" else _edits(draft)
    lines = [_zero(draft), "loss = loss_fn(batch)", "loss.backward()", *edits]
    return [
        "def closed_step(batch):",
        "    def closure():",
        *[f"        {line}" for line in lines],
        "        return loss",
        "    for o in optimizers: loss = o.step(closure)",
        "    return loss.detach()",
        "",
    ]
