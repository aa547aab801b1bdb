"""Programs that train on replicas as on one device, and must not alarm `mirror check`.

Those of tests/programs are checked as well; these are what that catalogue has not.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mirror


def update(optimizer, loss, clip=None):
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(clip.parameters(), 1.0)
    optimizer.step()


def train_in_run(model, optimizers):
    """Trains with the whole step in ``run``."""
    strategy = mirror.get_strategy()
    batches = [(torch.randn(20, 10), torch.randn(20, 3)) for _ in range(4)]

    def train_step(batch):
        x, y = batch
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()

    for batch in strategy.distribute_dataset(batches):
        strategy.run(train_step, args=(batch,))


def amp_bf16_convolutions():
    """Rounding errors in the loss cancel in one step, and not in another."""
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(4)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=15)
    for _ in range(15):
        x, y = torch.randn(18, 3, 16, 16), torch.randint(10, (18,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        update(optimizer, loss)
        scheduler.step()


def amp_scaler():
    """A GradScaler around autocast."""
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(12):
        x, y = torch.randn(16, 10), torch.randint(4, (16,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def attention():
    """A causal language model, written by hand, with tied weights."""

    class Block(nn.Module):
        def __init__(self, size, heads):
            super().__init__()
            self.heads = heads
            self.norms = nn.ModuleList([nn.LayerNorm(size), nn.LayerNorm(size)])
            self.qkv = nn.Linear(size, 3 * size)
            self.out = nn.Linear(size, size)
            self.mlp = nn.Sequential(
                nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)
            )

        def forward(self, x):
            batch, time, size = x.shape
            qkv = self.qkv(self.norms[0](x)).view(batch, time, 3, self.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(h.transpose(1, 2).reshape(batch, time, size))
            return x + self.mlp(self.norms[1](x))

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(40, 16)
            self.positions = nn.Embedding(12, 16)
            self.blocks = nn.Sequential(Block(16, 2), Block(16, 2))
            self.head = nn.Linear(16, 40, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens):
            positions = torch.arange(tokens.shape[1])
            return self.head(self.blocks(self.tokens(tokens) + self.positions(positions)))

    model = Language()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3
    )
    for _ in range(14):
        tokens = torch.randint(40, (6, 13))
        logits = model(tokens[:, :-1])
        update(
            optimizer, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), clip=model
        )


def contrastive_outside():
    """CLIP's loss of joined outputs, outside of the models."""
    images = nn.Linear(12, 8)
    texts = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    scale = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adam([*images.parameters(), *texts.parameters(), scale], lr=1e-2)
    for _ in range(10):
        a = F.normalize(images(torch.randn(14, 12)), dim=1)
        b = F.normalize(texts(torch.randn(14, 6)), dim=1)
        logits = scale.exp() * a @ b.T
        targets = torch.arange(14)
        loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
        update(optimizer, loss)


def conv_bias_before_norm():
    """A bias before a normalisation: its gradient is rounding alone."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.InstanceNorm2d(8, affine=True),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 3),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(15):
        x, y = torch.randn(10, 1, 8, 8), torch.randint(3, (10,))
        update(optimizer, F.cross_entropy(model(x), y))


def sparse_buffer():
    """A graph's adjacency, in compressed rows."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's: sparse CSR is a beta
                self.register_buffer("adjacency", torch.eye(6).to_sparse_csr())

        def forward(self, x):
            return self.layer((self.adjacency @ x.t()).t())

    model = Graph()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(4):
        update(optimizer, model(torch.randn(8, 6)).square().mean())


def frozen():
    """The first part is frozen, in eval mode, with a BatchNorm."""
    backbone = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU())
    backbone.requires_grad_(False).eval()
    head = nn.Linear(20, 4)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(10):
        x, y = torch.randn(13, 10), torch.randint(4, (13,))
        with torch.no_grad():
            features = backbone(x)
        update(optimizer, F.cross_entropy(head(features), y))


def lbfgs():
    """An optimizer with a closure that it calls several times."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    x = torch.randn(30, 3)
    y = x.prod(1, keepdim=True)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)


class Noisy(Dataset):
    def __len__(self):
        return 90

    def __getitem__(self, i):
        return torch.full((6,), float(i % 7)) + 0.1 * torch.randn(6), i % 3


def loader_with_workers():
    """A DataLoader with workers, shuffled, and with draws in its dataset."""
    loader = DataLoader(Noisy(), batch_size=16, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for x, y in loader:
            update(optimizer, F.cross_entropy(model(x), y))


def loss_in_forward():
    """Forward returns logits and a mean loss over tokens, some of them ignored."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 16)
            self.out = nn.Linear(16, 30)

        def forward(self, tokens, labels=None):
            logits = self.out(torch.tanh(self.embed(tokens)))
            loss = None
            if labels is not None:
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            return {"loss": loss, "logits": logits}

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(10):
        tokens = torch.randint(30, (9, 8))
        labels = tokens.masked_fill(torch.rand(9, 8) < 0.4, -100)
        update(optimizer, model(tokens, labels)["loss"])


def lstm():
    """A tagger of sequences, batch first."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 12)
            self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True, bidirectional=True)
            self.out = nn.Linear(32, 5)

        def forward(self, tokens):
            hidden, _ = self.lstm(self.embed(tokens))
            return self.out(hidden)

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(10):
        tokens = torch.randint(50, (10, 9))
        update(optimizer, F.cross_entropy(model(tokens).transpose(1, 2), tokens % 5), clip=model)


def per_example_losses():
    """Forward returns one loss for each example."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(10, 4)

        def forward(self, x, y):
            return F.cross_entropy(self.net(x), y, reduction="none")

    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(10):
        losses = model(torch.randn(15, 10), torch.randint(4, (15,)))
        loss = losses.topk(8).values.mean() + losses.std()  # of the joined losses: exact
        update(optimizer, loss)


def residual_cnn():
    """A residual network with GroupNorm."""

    class Residual(nn.Module):
        def __init__(self, before, after, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
            self.norm1 = nn.GroupNorm(4, after)
            self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
            self.norm2 = nn.GroupNorm(4, after)
            self.shortcut = nn.Conv2d(before, after, 1, stride)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            h = self.relu(self.norm1(self.conv1(x)))
            return self.relu(self.norm2(self.conv2(h)) + self.shortcut(x))

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.MaxPool2d(2),
        Residual(8, 16, 2),
        Residual(16, 16, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for _ in range(8):
        x, y = torch.randn(12, 3, 16, 16), torch.randint(5, (12,))
        update(optimizer, F.cross_entropy(model(x), y))


def rnn_state():
    """Truncated backpropagation: the state of one call goes into the next."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(6, 12, batch_first=True)
            self.out = nn.Linear(12, 3)

        def forward(self, x, state=None):
            h, state = self.rnn(x, state)
            return self.out(h), state

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = None
    for _ in range(10):
        out, state = model(torch.randn(8, 5, 6), state)
        state = state.detach()
        update(optimizer, F.mse_loss(out, torch.ones(8, 5, 3)))


def rnn_state_between():
    """A decoder gets the encoder's state, with examples in dimension 1, before other arguments."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(6, 12, batch_first=True)
            self.out = nn.Linear(12, 3)

        def forward(self, x, state, bias):
            return self.out(self.rnn(x, state)[0]) + bias[:, None]

    encoder, decoder = nn.GRU(6, 12, batch_first=True), Decoder()
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    for _ in range(6):
        x = torch.randn(8, 5, 6)
        _, state = encoder(x)
        update(optimizer, F.mse_loss(decoder(x, state, torch.randn(8, 3)), torch.ones(8, 5, 3)))


def per_example_gradients():
    """Gradients of single examples, by torch.func, are clipped and averaged."""
    model = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(params, x, y):
        return F.cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

    for _ in range(6):
        params = {name: p.detach() for name, p in model.named_parameters()}
        per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        grads = per_example(params, torch.randn(7, 10), torch.randint(4, (7,)))
        for name, p in model.named_parameters():
            p.grad = grads[name].clamp(-0.1, 0.1).mean(0)
        optimizer.step()


def small_batches():
    """Batches smaller than the replicas, and last ones that do not divide."""
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 2))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    for size in (1, 4, 3, 1, 2, 5, 7, 1):
        loss = F.mse_loss(model(torch.randn(size, 5)), torch.ones(size, 2), reduction="sum")
        update(optimizer, loss)


def transformer():
    """The gradient of a key bias is nothing but rounding, and Adam makes steps of it."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(16):
        x = torch.randn(9, 7, 16)
        update(optimizer, F.cross_entropy(model(x).flatten(0, 1), torch.randint(5, (63,))))


def vae_outside_noise():
    """A variational autoencoder with its noise as an argument."""

    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(12, 8)
            self.decode = nn.Linear(4, 12)

        def forward(self, x, noise):
            mean, log_var = self.encode(x).chunk(2, 1)
            return self.decode(mean + noise * (log_var / 2).exp()), mean, log_var

    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(10):
        x = torch.randn(11, 12)
        again, mean, log_var = model(x, torch.randn(11, 4))
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        update(optimizer, F.mse_loss(again, x) + 0.1 * divergence)


def wasserstein_gan():
    """The gradient of the critic's last bias is nothing but rounding."""
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    of_generator = torch.optim.RMSprop(generator.parameters(), lr=5e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=5e-3)
    for step in range(12):
        loss = (
            critic(generator(torch.randn(21, 4)).detach()).mean()
            - critic(torch.randn(21, 8)).mean()
        )
        update(of_critic, loss)
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.05, 0.05)
        if step % 3 == 2:
            update(of_generator, -critic(generator(torch.randn(21, 4))).mean())


def two_optimizers_in_run():
    """The steps of two optimizers in one run are one step."""
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
    train_in_run(model, [torch.optim.AdamW(layer.parameters()) for layer in (model[0], model[2])])


def backward_for_chosen_inputs():
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 3))
        loss.backward(inputs=list(model.parameters()))
        optimizer.step()


EQUAL = (
    amp_bf16_convolutions,
    amp_scaler,
    attention,
    backward_for_chosen_inputs,
    contrastive_outside,
    conv_bias_before_norm,
    sparse_buffer,
    frozen,
    lbfgs,
    loader_with_workers,
    loss_in_forward,
    lstm,
    per_example_gradients,
    per_example_losses,
    residual_cnn,
    rnn_state,
    rnn_state_between,
    small_batches,
    transformer,
    two_optimizers_in_run,
    vae_outside_noise,
    wasserstein_gan,
)
