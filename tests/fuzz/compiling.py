"""The source of single statements, which only programs of compiled steps have.

Each event is a list of ``(step, lines)``, as in ``events.py``.
"""

# Layers and stems that no compiled step takes: docs/compiled-steps.md says so.
REFUSED = ("Experts", "Remembering", "momentum=None", "max_norm", "sparse=True")

_GROUPS = "for group in [g for o in optimizers for g in o.param_groups]:"
_TOLD = "    if {test}: group[{name!r}] = {value}"


def _change(name, value, test=None):
    test = test or f"{name!r} in group"
    return [("all", [_GROUPS, _TOLD.format(test=test, name=name, value=value)])]


# Options of optimizers that change between steps.
WARM = {
    "weight decay": _change("weight_decay", "0.01 * i"),
    "momentum": _change("momentum", "0.9 - 0.02 * i", "group.get('momentum')"),
    "betas": _change("betas", "(0.9 - 0.02 * i, group['betas'][1])"),
    "eps": _change("eps", "1e-5 * (1 + i)"),
    "rate": [("all", [_GROUPS, "    group['lr'] *= 0.95"])],
}
CHECKPOINT = [
    (
        1,
        [
            "checkpoint = m.checkpoint(model=model, **{f'o{j}': o for j, o in "
            "enumerate(optimizers)})",
            "checkpoint.save()",
        ],
    ),
    (4, ["checkpoint.restore()"]),
]
# Numbers that a step gets as an argument.
FACTORS = ("", "1.0 + 0.1 * i", "1 + i % 3")
EVALUATE = [
    (
        "all",
        [
            "if i % 3 != 0:",
            "    model.eval()",
            "    with torch.{mode}():",
            "        m.record('compiled eval', evaluate(batch))",
            "    model.train()",
        ],
    ),
]
SWITCH = [("odd", ["model.head.training = not model.head.training"])]
PLAIN_EVENTS = {f"warm {name}": event for name, event in WARM.items()} | {
    "evaluate": EVALUATE,
    "switch": SWITCH,
}

# Terms of a loss that replicas compute together; ``out`` is ``[B, ...]``.
COLLECTIVES = (
    "loss = loss + 0.01 * m.total(out.sum(0)).square().mean()",
    "loss = loss + 0.01 * (out * m.total(out.detach().sum(0))).mean()",
    "loss = loss * (1 + 0.01 * m.total(out.detach().square().sum()))",
)
# Lengths of sequences, by what they are called.
LENGTHS = {
    "fixed": (4,),
    "two": (4, 6),
    "many": (4, 4, 3, 7, 2, 9, 5, 8, 6, 3, 7),
    "one": (4, 1, 4, 1, 5),
}
