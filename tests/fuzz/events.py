"""What happens between two steps, in the cross-replica context: source of single statements.

Each is a list of ``(step, lines)``; ``{k}`` and ``{j}`` are numbers of parameters.
"""

FREEZE = [
    (1, ["params()[{k}].requires_grad_(False)"]),
    (3, ["params()[{k}].requires_grad_(True)"]),
]
TOGGLE = [("odd", ["params()[{k}].requires_grad_(i % 4 == 1)"])]
FREEZE_STEM = [
    (2, ["model.stem.requires_grad_(False)"]),
    (4, ["model.stem.requires_grad_(True)"]),
]
FREEZE_REST = [
    (1, ["for p in params()[:-2]: p.requires_grad_(False)"]),
    (
        3,
        [
            "for name, p in list(model.named_parameters())[:-2]:",
            "    p.requires_grad_(trained.get(name, True))",
        ],
    ),
]
FREEZE_AND_FORGET = [
    (2, ["params()[{k}].requires_grad_(False)", "params()[{k}].grad = None"]),
]
EVAL = [
    (
        1,
        [
            "model.eval()",
            "with torch.{mode}():",
            "    m.record('eval', m.call(WAY, predict, batch))",
            "model.train()",
        ],
    ),
]
SAVE = [
    (1, ["saved = copy.deepcopy((model.state_dict(), [o.state_dict() for o in optimizers]))"]),
    (
        3,
        [
            "model.load_state_dict(saved[0])",
            "for o, s in zip(optimizers, saved[1]): o.load_state_dict(s)",
        ],
    ),
]
SAVE_BYTES = [
    (
        1,
        [
            "file = io.BytesIO()",
            "torch.save([model.state_dict(), *[o.state_dict() for o in optimizers]], file)",
        ],
    ),
    (
        2,
        [
            "read = torch.load(io.BytesIO(file.getvalue()))",
            "model.load_state_dict(read[0], assign={assign})",
            "for o, s in zip(optimizers, read[1:]): o.load_state_dict(s)",
        ],
    ),
]
REBUILD = [
    (
        2,
        [
            "with m.scope():",
            "    older, states = model, [o.state_dict() for o in optimizers]",
            "    model = make_model()",
            "    model.load_state_dict(older.state_dict())",
            "    optimizers = make_optimizers()",
            "for o, s in zip(optimizers, states): o.load_state_dict(s)",
        ],
    ),
]
COPY = [
    (
        2,
        [
            "states = [o.state_dict() for o in optimizers]",
            "model = m.mirror(copy.deepcopy(model))",
            "with m.scope():",
            "    optimizers = make_optimizers()",
            "for o, s in zip(optimizers, states): o.load_state_dict(s)",
        ],
    ),
]
SURGERY = [
    (
        2,
        [
            "torch.manual_seed(5)",
            "model.head = nn.Linear(6, 3)",
            "optimizers[0].add_param_group({'params': list(model.head.parameters())})",
        ],
    ),
]
SURGERY_AGAIN = [
    (
        2,
        [
            "torch.manual_seed(5)",
            "model.head = nn.Linear(6, 3)",
            "with m.scope():",
            "    optimizers = make_optimizers()",
        ],
    ),
]
NEW_PARAMETER = [
    (
        2,
        [
            "model.head.bias = nn.Parameter(torch.zeros(3))",
            "optimizers[0].add_param_group({'params': [model.head.bias], 'lr': 0.001})",
        ],
    ),
]
WRITE = [(2, ["with torch.no_grad(): params()[{k}].mul_(0.5)"])]
WRITE_DATA = [(2, ["params()[{k}].data.mul_(0.5)"])]
SET_DATA = [(2, ["params()[{k}].data = params()[{k}].detach() * 0.5"])]
RATE = [(2, ["optimizers[0].param_groups[0]['lr'] *= 0.5"])]
LOOK = [("odd", ["m.record('parameters', params())", "m.record('gradients', grads())"])]
FORGET_STATE = [(2, ["optimizers[0].state.clear()"])]
HALVE_STATE = [
    (
        2,
        [
            "for state in optimizers[0].state.values():",
            "    for value in state.values():",
            "        if torch.is_tensor(value) and value.dim(): value.mul_(0.5)",
        ],
    ),
]
SKIP_EXTRA = [("all", ["model.use_extra = i % 3 != 1"])]
APPLY = [(1, ["model.apply(lambda module: setattr(module, 'seen_by_apply', True))"])]
MOVE = [(1, ["model.to(m.device)"])]
GRADS_OUTSIDE = [
    (
        2,
        [
            "x = torch.as_tensor(batches[i][0])",
            "used = [p for p in params() if p.requires_grad]",
            "total = predict(batches[i]).square().mean()",
            "m.record('outside', torch.autograd.grad(total, used, allow_unused=True))",
        ],
    ),
]
BACKWARD_BETWEEN = [
    (2, ["predict(batches[i]).square().mean().backward()"]),
]
WAITING = [
    (
        2,
        [
            "with m.no_sync():",
            "    m.step(WAY, loss_fn, lambda loss: loss.backward(), batches[i])",
        ],
    ),
]
WAITING_TWICE = [
    (
        "odd",
        [
            "with m.no_sync():",
            "    m.step(WAY, loss_fn, lambda loss: loss.backward(), batches[i])",
            "    m.step(WAY, loss_fn, lambda loss: loss.backward(), batches[i - 1])",
        ],
    ),
]
CLEAR_GRADS = [(2, ["for p in params(): p.grad = None"])]
NONE_LAST = [("odd", ["for o in optimizers: o.zero_grad(set_to_none=False)"])]

# Those that any program may have.
ANY = {
    "freeze": FREEZE,
    "toggle": TOGGLE,
    "freeze stem": FREEZE_STEM,
    "freeze rest": FREEZE_REST,
    "freeze and forget": FREEZE_AND_FORGET,
    "eval": EVAL,
    "write": WRITE,
    "write data": WRITE_DATA,
    "set data": SET_DATA,
    "rate": RATE,
    "look": LOOK,
    "apply": APPLY,
    "move": MOVE,
    "clear grads": CLEAR_GRADS,
    "backward between": BACKWARD_BETWEEN,
    "grads outside": GRADS_OUTSIDE,
    "zero between": NONE_LAST,
    "waiting": WAITING,
    "waiting twice": WAITING_TWICE,
}
# Those that touch optimizers and models as wholes.
SAVING = {
    "save": SAVE,
    "save bytes": SAVE_BYTES,
    "rebuild": REBUILD,
    "copy": COPY,
    "forget state": FORGET_STATE,
    "halve state": HALVE_STATE,
}
CHANGING = {
    "surgery": SURGERY,
    "surgery again": SURGERY_AGAIN,
    "new parameter": NEW_PARAMETER,
}
