"""The source of what a program makes before its loop: batches, models, optimizers."""

from tests.fuzz.compiling import LENGTHS
from tests.fuzz.optimizers import SCHEDULERS

CRITIC_MADE = [
    "with m.scope():",
    "    critic = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))",
    "    critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.01, eps=1e-4)",
]


def setup(draft):
    k, sizes = draft.k, _sizes(draft)
    draft.num_steps = len(sizes)
    options = f"seed={k.whole('data seed', 1000)}, container={draft.containers}"
    options += ", per_token=True" * draft.model.per_token + ", as_numpy=True" * draft.as_numpy
    if draft.is_compiled and draft.model.data in ("seq", "tok"):
        lengths = LENGTHS[k.choose("lengths", tuple(LENGTHS))]
        options += f", lengths={lengths}" * (len(lengths) > 1)
    made = [f'batches = m.placed(data.batches("{draft.model.data}", {sizes}, {options}))', ""]
    late = k.maybe("mirror late", 0.3)
    made += ["def make_model():", "    model = m.convert(Net())"]
    if draft.has("lazy"):
        # Each worker has the whole batch here, which statistics would count twice.
        mode = "model.eval()" if draft.of_workers else "model"
        made += [f"    {mode}({_first_input(draft)})", "    model.train()"]
    made += ["    return model", "", "def make_optimizers():"]
    made += [f"    {line}" for line in _optimizers(draft)]
    made += _order(draft, late and not draft.has("lazy"))
    if draft.has_critic:
        made += CRITIC_MADE
    made += ["trained = {name: p.requires_grad for name, p in model.named_parameters()}"]
    can_have = draft.optimizer.name != "LBFGS" and k.maybe("schedule", 0.2)
    draft.scheduler = k.choose("scheduler", SCHEDULERS) if can_have else ""
    if draft.scheduler:
        if draft.is_compiled and draft.optimizer.name in ("Adam", "AdamW", "NAdam", "RAdam"):
            draft.scheduler = draft.scheduler.replace(", cycle_momentum=False", "")
        made.append("optimizer = optimizers[0]")
        made.append(f"scheduler = lr_scheduler.{draft.scheduler}")
    if draft.scaled:
        made.append("scaler = m.GradScaler(m.device.type, init_scale=256.0, growth_interval=2)")
    made += _averages(draft)
    return made


def _order(draft, late):
    """When the model and the optimizers are made, and what is done before training."""
    k = draft.k
    where = k.choose("optimizers made", ("in the scope", "outside", "first"), simplest=0.6)
    optimizers = {"in the scope": ["with m.scope():", "    optimizers = make_optimizers()"]}
    optimizers = optimizers.get(where, ["optimizers = make_optimizers()"])
    evaluate = ["model.eval()", "with torch.no_grad():",
                "    m.record('first', predict(batches[0]))", "model.train()"]  # fmt: skip
    load = [
        "loaded = {name: v * 0.9 if v.is_floating_point() else v.clone()",
        "          for name, v in model.state_dict().items()}",
        f"if {k.choose('loaded by', ('True', 'm.is_chief'))}:",
        "    model.load_state_dict(loaded)",
    ]
    if late:
        made = ["", "model = make_model()"]
        made += [*optimizers, "model = m.mirror(model)"] if where == "first" else []
        made += ["model = m.mirror(model)", *optimizers] if where != "first" else []
    else:
        made = ["", "with m.scope():", "    model = make_model()", *optimizers]
    before = k.choose("before training", ("", "load", "evaluate", "load, evaluate",
                                          "evaluate, load"), simplest=0.5)  # fmt: skip
    lines = {"load": load, "evaluate": evaluate}
    draft.before_training = [
        line for one in filter(None, before.split(", ")) for line in lines[one]
    ]
    return made


def _first_input(draft):
    first = {"tuple": "batches[0][0]", "dict": 'batches[0]["x"]', "data.Pair": "batches[0].x"}
    return f"torch.as_tensor({first[draft.containers]})"


def _sizes(draft):
    k, least = draft.k, 2 if draft.has("rows") else 1
    least = draft.n if draft.of_workers and draft.has("filled") else least
    number = k.number("steps", 4, 7) + 4 * bool(draft.compiles)
    pattern = k.choose("sizes", ("even", "last ragged", "uneven", "small"))
    if pattern == "even":
        return [2 * draft.n] * number
    if pattern == "last ragged":
        return [2 * draft.n] * (number - 1) + [max(least, k.whole("last", 2 * draft.n) + 1)]
    high = 9 if pattern == "uneven" else draft.n
    return [max(least, k.whole(f"size {i}", high) + 1) for i in range(number)]


def _optimizers(draft):
    k, chosen = draft.k, draft.optimizer
    fitting = [o for o in chosen.options if not (draft.has("complex") and "fused" in o)]
    if draft.has("half float"):  # centered: a small difference of large numbers
        fitting = [o for o in fitting if "centered" not in o]
    if draft.has("half fp16"):  # PyTorch reads momenta of 2 bytes as if of 4, past their end
        fitting = [o for o in fitting if not ("momentum" in o and "fused" in o)]
    if draft.sparse:
        unable = ("fused", "foreach", "weight_decay", "maximize", "nesterov")
        fitting = [o for o in fitting if not any(word in o for word in unable)]
    options = chosen.always + k.choose("optimizer options", fitting, simplest=0.4)
    params = "model.parameters()"
    how = k.choose("groups", ("one", "two", "named", "halves", "apart"), simplest=0.5)
    if not chosen.groups or draft.scaled:
        how = "one"
    draft.groups = how
    if how == "two":
        params = "[{'params': ps[:1], 'lr': 0.002}, {'params': ps[1:]}]"
    elif how == "named":
        params = "model.named_parameters()"
    elif how == "halves":
        params = "ps[::2]"
    one = f"torch.optim.{chosen.name}({params}, {options})"
    if how == "halves":
        other = "torch.optim.SGD(ps[1::2], lr=0.03, momentum=0.5)"
        return ["ps = list(model.parameters())", f"return [{one}, {other}]"]
    if how == "apart" and draft.sparse:
        return [
            "embedding = [model.stem.weight]",
            "rest = [p for p in model.parameters() if p is not model.stem.weight]",
            f"dense = torch.optim.{chosen.name}(rest, {options})",
            "return [dense, torch.optim.SparseAdam(embedding, lr=0.01, eps=1e-5)]",
        ]
    if how == "two":
        return ["ps = list(model.parameters())", f"return [{one}]"]
    return [f"return [{one}]"]


def _averages(draft):
    k = draft.k
    draft.average = k.choose("average", ("", "deepcopy", "swa", "ema"), simplest=0.85)
    is_odd = draft.has("complex half fp16 float") and draft.average != "deepcopy"
    if is_odd or draft.has("uncopied"):
        draft.average = ""
    made = {
        "": [],
        "deepcopy": ["averaged = copy.deepcopy(model).requires_grad_(False)"],
        "swa": ["averaged = AveragedModel(model)"],
        "ema": ["averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), "
                "use_buffers=False)"],
    }  # fmt: skip
    return made[draft.average]
