"""The source of a module drawn from knobs: a stem for the data, some layers, a head."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer as source.

    Attributes:
        name: what makes it; maps ``h`` to the same shape.
        kinds: where it fits: ``vec`` is ``[B, 6]``, ``seq`` is ``[B, 4, 6]``, ``img`` is
            ``[B, 6, 5, 5]``.
        traits: what the rest of the program must know. ``flat``: some gradients are zero but for
            rounding. ``once``: has no second derivative. ``complex``, ``half``, ``float``: dtypes.
            ``rows``: needs more than one example. ``filled``: needs one on every worker.
            ``remembers``: sets ``seen``. ``uncopied``: ``deepcopy`` of the plain module fails
            after a forward.
    """

    name: str
    kinds: str = "vec seq"
    traits: str = ""


LAYERS = (
    Layer("nn.Sequential(nn.Linear(6, 6), nn.Tanh())"),
    Layer("layers.Raw()"),
    Layer("nn.LayerNorm(6)"),
    Layer("nn.RMSNorm(6)"),
    Layer("nn.Sequential(nn.Linear(6, 6), nn.PReLU(6))", "vec"),
    Layer("nn.GroupNorm(2, 6)", "vec img"),
    Layer("nn.BatchNorm1d(6)", "vec", "flat rows"),
    Layer("nn.BatchNorm1d(6, momentum=None)", "vec", "flat rows"),
    Layer("nn.BatchNorm1d(6, affine=False, track_running_stats=False)", "vec", "flat rows"),
    Layer("layers.Channels(nn.BatchNorm1d(6))", "seq", "flat rows"),
    Layer("nn.BatchNorm2d(6)", "img", "flat rows"),
    Layer("nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.Tanh())", "img"),
    Layer("nn.Sequential(nn.Conv2d(6, 6, 1, groups=3), nn.BatchNorm2d(6), nn.GELU())", "img",
          "flat rows"),
    Layer("nn.ConvTranspose2d(6, 6, 3, padding=1)", "img"),
    Layer("nn.InstanceNorm2d(6, affine=True)", "img", "flat filled"),
    Layer("layers.Channels(nn.Conv1d(6, 6, 3, padding=1))", "seq"),
    Layer("layers.Gains()"),
    Layer("layers.Chosen()"),
    Layer("layers.Tied()"),
    Layer("layers.Shared()"),
    Layer("layers.Nested()"),
    Layer("layers.Custom()", "vec seq", "once custom"),
    Layer("layers.CustomListed()", "vec seq", "once custom"),
    Layer("layers.Checkpointed(use_reentrant=False)", "vec seq", "once"),
    Layer("layers.Checkpointed(use_reentrant=True)", "vec seq", "once"),
    Layer("layers.Counting()"),
    Layer("layers.parametrized()"),
    Layer("layers.weight_norm()"),
    Layer("layers.old_weight_norm()", "vec seq", "uncopied"),
    Layer("layers.spectral_norm()"),
    Layer("layers.old_spectral_norm()", "vec seq", "uncopied"),
    Layer("layers.orthogonal()"),
    Layer("layers.frozen()"),
    Layer("layers.PartlyFrozen()"),
    Layer("layers.In(torch.float32)", "vec seq", "float"),
    Layer("layers.In(torch.bfloat16)", "vec seq", "half"),
    Layer("layers.In(torch.float16)", "vec seq", "fp16"),
    Layer("layers.Complex()", "vec seq", "complex filled"),
    Layer("layers.Recurrent('LSTM')", "seq"),
    Layer("layers.Recurrent('LSTM', num_layers=2, proj_size=3)", "seq"),
    Layer("layers.Recurrent('GRU', bidirectional=True)", "seq"),
    Layer("layers.Recurrent('RNN', num_layers=2)", "seq"),
    Layer("layers.Cell()", "seq"),
    Layer("layers.Attention()", "seq", "flat once"),
    Layer("nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)", "seq",
          "flat once"),
    Layer("nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, "
          "batch_first=True, norm_first=True), 2, enable_nested_tensor=False)", "seq",
          "flat once"),
    Layer("layers.Decoder()", "seq", "flat once"),
    Layer("layers.Positions()", "seq"),
    Layer("layers.Twin()"),
    Layer("layers.Functional()"),
    Layer("layers.Jumping()"),
    Layer("layers.Remembering()", "vec seq", "remembers uncopied"),
    Layer("nn.Sequential(nn.LazyLinear(6), nn.Tanh())", "vec seq", "lazy"),
    Layer("nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.SiLU())"),
    Layer("layers.Experts()", "vec seq", "once"),
)  # fmt: skip

_STEMS = {
    "vec": (("nn.Linear(6, 6)", ""),),
    "seq": (("nn.Linear(6, 6)", ""),),
    "img": (("nn.Conv2d(1, 6, 2)", ""),),
    "tok": (
        ("nn.Embedding(9, 6)", ""),
        ("nn.Embedding(9, 6, padding_idx=1)", ""),
        ("nn.Embedding(9, 6, max_norm=1.0)", ""),
        ("nn.Embedding(9, 6, max_norm=0.7, norm_type=1.0, padding_idx=0)", ""),
        ("nn.Embedding(9, 6, scale_grad_by_freq=False)", ""),
        ("nn.Embedding(9, 6, sparse=True)", "sparse"),
        ("nn.Embedding(9, 6, sparse=True, padding_idx=2)", "sparse"),
    ),
}


@dataclasses.dataclass
class Model:
    """A drawn module.

    Attributes:
        data: what it takes: ``vec``, ``seq``, ``img`` or ``tok``.
        traits: of all its layers.
        extra: whether ``model.use_extra`` switches a layer on and off.
        output: how the output comes: ``plain``, ``tuple``, ``dict``, ``dataclass``.
        takes_target: whether ``forward(x, y)`` returns the loss.
        source: of ``class Net``.
    """

    data: str
    traits: set[str]
    extra: bool
    output: str
    per_token: bool
    source: str


def draw_model(knobs, refused=()):
    """Draws a module without what has one of these words in its source."""

    def is_taken(source):
        return not any(word in source for word in refused)

    data = knobs.choose("data", ("vec", "seq", "img", "tok"), simplest=0.2)
    kind = "seq" if data == "tok" else data
    stem, stem_traits = knobs.choose("stem", [s for s in _STEMS[data] if is_taken(s[0])])
    traits = set(stem_traits.split())
    number = knobs.number("number of layers", 0, 4)
    fitting = [la for la in LAYERS if kind in la.kinds.split() and is_taken(la.name)]
    made, lines = [f"        self.stem = {stem}"], []
    for i in range(number):
        layer = knobs.choose(f"layer {i}", fitting)
        traits |= set(layer.traits.split())
        made.append(f"        self.layer{i} = {layer.name}")
        lines.append(f"        h = self.layer{i}(h)")
    extra = knobs.maybe("extra layer", 0.15)
    if extra:
        layer = "nn.Conv2d(6, 6, 1)" if kind == "img" else "nn.Linear(6, 6)"
        made += [f"        self.extra = {layer}", "        self.use_extra = True"]
        at = knobs.choose("extra at", (len(lines), 0))
        lines[at:at] = ["        if self.use_extra:", "            h = self.extra(h)"]
    per_token = kind == "seq" and knobs.maybe("per token", 0.3)
    if not per_token:
        pool = {"vec": "", "seq": "h = h.mean(1)", "img": "h = h.mean((2, 3))"}[kind]
        lines += [f"        {pool}"] if pool else []
    if knobs.maybe("second input", 0.15):
        lines.append("        h = h if z is None else h * z" + "[:, None]" * per_token)
        traits.add("second input")
    output = knobs.choose("output", ("plain", "tuple", "dict", "dataclass"), simplest=0.6)
    returned = {
        "plain": "self.head(h)",
        "tuple": "self.head(h), h.square().mean()",
        "dict": '{"out": self.head(h), "aux": h.square().mean()}',
        "dataclass": "layers.Nested.Output(self.head(h), (h.square().mean(),))",
    }[output]
    made.append("        self.head = nn.Linear(6, 3)")
    if knobs.maybe("unused parameter first", 0.1):
        made.insert(0, "        self.unused = nn.Linear(2, 2)")
    start = "self.stem(x)" if data == "tok" else "torch.tanh(self.stem(x))"
    source = "\n".join(
        [
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *made,
            "",
            "    def forward(self, x, z=None):",
            f"        h = {start}",
            *lines,
            f"        return {returned}",
            "",
        ]
    )
    return Model(data, traits, extra, output, per_token, source)
