"""A language model on real text: variable lengths, and a loss that is a mean over tokens.

A small transformer learns the paragraphs of Python's own help texts, byte by byte. Each batch is
padded to its longest paragraph, so replicas get equally many paragraphs and unequally many
tokens. Setting ``ReplicaContext.weight`` to the number of tokens makes the loss and the gradient
means over all tokens, those of one device: the program compares them, and what comes out without.

    python examples/language_model.py
"""

import copy
import math
import warnings
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import mirror

PADDING, BEGIN = 0, 1  # bytes that text does not contain
MAX_LENGTH = 128
WIDTH = 64


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(MAX_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        # Padding comes last, so that causal attention never looks at it.
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.token(tokens) + self.position.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def load_paragraphs() -> list[Tensor]:
    paragraphs = [" ".join(p.split()) for text in topics.values() for p in text.split("\n\n")]
    encoded = [bytes([BEGIN, *p.encode()])[: MAX_LENGTH + 1] for p in paragraphs if p]
    return [torch.tensor(list(one)) for one in encoded]


def collate(paragraphs: list[Tensor]) -> Tensor:
    return pad_sequence(paragraphs, batch_first=True, padding_value=PADDING)


def token_mean(model: nn.Module, tokens: Tensor, weighted: bool = True) -> Tensor:
    """The loss per token; the same code on a replica and, without replicas, on one device."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    context = mirror.get_replica_context()
    if weighted and context is not None:
        context.weight = int((targets != PADDING).sum())
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def compare(strategy: mirror.MirroredStrategy, model: nn.Module, tokens: Tensor) -> None:
    """Prints how far the replicas' gradient is from one device's, with token weights and without.

    The relative difference: the norm of the difference over the norm of the gradient.
    """

    def gradient(model: nn.Module) -> Tensor:
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return flat

    plain = copy.deepcopy(model)  # an ordinary model on the first device
    token_mean(plain, tokens.to(strategy.devices[0])).backward()
    expected = gradient(plain)
    for weighted in (True, False):
        with warnings.catch_warnings():
            if not weighted:  # mirror warns of just what is shown here
                warnings.filterwarnings("ignore", "the loss of this backward pass inside run")
            for batch in strategy.distribute_dataset([tokens]):
                strategy.run(
                    lambda part, w: token_mean(model, part, w).backward(), (batch, weighted)
                )
        difference = (gradient(model) - expected).norm() / expected.norm()
        name = "number of tokens" if weighted else "number of examples"
        print(f"weights by {name}: the gradient differs from one device's by {difference:.1e}")


def main() -> None:
    torch.manual_seed(0)
    paragraphs = load_paragraphs()
    test = paragraphs[::10]
    train = [one for i, one in enumerate(paragraphs) if i % 10]
    loader: DataLoader[Tensor] = DataLoader(
        train,  # type: ignore[arg-type]  # any sequence will do
        batch_size=32,
        shuffle=True,
        collate_fn=collate,
    )

    # All GPUs; without one, four simulated devices.
    devices = None if torch.cuda.is_available() else ["cpu"] * 4
    with mirror.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            model = LanguageModel()
            optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        compare(strategy, model, collate(train[:30]))

        def train_step(tokens: Tensor) -> Tensor:
            loss = token_mean(model, tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for step, batch in enumerate(strategy.distribute_dataset(loader), 1):
            losses = strategy.run(train_step, args=(batch,))
            if step % 10 == 0:
                # The mean has the weights that train_step has set: it is the mean over tokens.
                loss = strategy.reduce("mean", losses).item()
                print(f"step {step}: perplexity {math.exp(loss):.1f} per byte", flush=True)

        with torch.no_grad():
            for batch in strategy.distribute_dataset([collate(test)]):
                losses = strategy.run(token_mean, args=(model, batch))
        loss = strategy.reduce("mean", losses).item()
        print(f"{len(test)} other paragraphs: perplexity {math.exp(loss):.1f}; by chance 256")


if __name__ == "__main__":
    main()
