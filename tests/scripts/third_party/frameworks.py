"""Loops that others wrote: lightning, ignite, skorch, accelerate, transformers.Trainer."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.scripts.third_party.program import Program, case, generator, regress, sequences, vectors


def _net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


@case("pytorch-ignite", "create_supervised_trainer", ways=(1,))
def ignite():
    from ignite.engine import Events, create_supervised_trainer

    def loop(model, optimizer, batches, loss):
        trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
        losses = []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output)
        )
        trainer.run(batches, max_epochs=1)
        return losses

    return Program(make=_net, batches=vectors(4), loss=regress, loop=loop)


@case("accelerate", "prepare and backward, gradient accumulation over 2", ways=(1,))
def accelerate():
    from accelerate import Accelerator

    def loop(model, optimizer, batches, loss):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        wrapped, stepper = accelerator.prepare(model, optimizer)
        losses = []
        for batch in batches:
            with accelerator.accumulate(wrapped):
                value = loss(wrapped, batch)
                accelerator.backward(value)
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                stepper.step()
                stepper.zero_grad()
            losses.append(float(value))
        return losses

    return Program(make=_net, batches=vectors(4), loss=regress, loop=loop)


@case("lightning", "Trainer.fit, clipping, a scheduler", ways=(1,))
def lightning():
    from lightning.pytorch import LightningModule, Trainer

    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = _net()
            self.losses = []

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            loss = F.mse_loss(self(batch[0]), batch[1])
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def loop(model, optimizer, batches, loss):
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
        losses, model.losses = model.losses, []
        return losses

    return Program(make=Lit, batches=vectors(4), loss=regress, loop=loop)


@case("lightning", "Fabric: setup, backward, clip_gradients", ways=(1,))
def fabric():
    from lightning.fabric import Fabric

    def loop(model, optimizer, batches, loss):
        fabric = Fabric(accelerator="cpu", devices=1)
        wrapped, stepper = fabric.setup(model, optimizer)
        losses = []
        for batch in batches:
            stepper.zero_grad()
            value = loss(wrapped, batch)
            fabric.backward(value)
            fabric.clip_gradients(wrapped, stepper, max_norm=0.5)
            stepper.step()
            losses.append(float(value))
        return losses

    return Program(make=_net, batches=vectors(4), loss=regress, loop=loop)


@case("skorch", "NeuralNet.fit with the optimizer it makes", ways=(1,))
def skorch():
    from skorch import NeuralNet

    def loop(model, optimizer, batches, loss):
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        net = NeuralNet(
            model, nn.MSELoss, optimizer=torch.optim.SGD, lr=0.02, max_epochs=1, batch_size=5,
            train_split=None, iterator_train__shuffle=False, verbose=0,
        )  # fmt: skip
        net.fit(x, y)
        return list(net.history[:, "train_loss"])

    return Program(make=_net, batches=vectors(4), loss=regress, loop=loop)


@case("transformers", "Trainer, ragged labels, accumulation over 2", ways=(1,))
def hugging_face_trainer():
    import tempfile

    import transformers

    def make():
        options = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 64}
        draws = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, **draws))

    def loop(model, optimizer, batches, loss):
        examples = []
        for i, tokens in enumerate(torch.cat(list(batches))):
            labels = tokens.clone()
            labels[: i % 7] = -100
            examples.append({"input_ids": tokens, "labels": labels})
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, per_device_train_batch_size=5, gradient_accumulation_steps=2,
                num_train_epochs=1, use_cpu=True, report_to=[], save_strategy="no",
                logging_steps=1, disable_tqdm=True, learning_rate=1e-2, lr_scheduler_type="linear",
                optim="sgd",
            )  # fmt: skip
            trainer = transformers.Trainer(model, arguments, train_dataset=examples)
            trainer.train()
            return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    return Program(
        make=make, batches=sequences(12), loss=lambda m, b: m(b).logits.mean(), loop=loop
    )


@case("torchmetrics", "accuracy updated in forward", ways=(1, 3))
def metric_in_forward():
    import torchmetrics

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 3)
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

        def forward(self, x, y):
            out = self.body(x)
            self.accuracy.update(out, y)
            return F.cross_entropy(out, y)

    g = generator()
    batches = [
        (torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)) for n in (7, 5, 8, 2)
    ]
    return Program(
        make=Net,
        batches=batches,
        loss=lambda m, b: m(b[0], b[1]),
        extra=lambda model: {"accuracy": model.accuracy.compute()},
    )


@case("captum", "input gradients as a penalty, then Saliency", ways=(1,))
def captum():
    from captum.attr import Saliency

    def loss(model, batch):
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, batch[1]) + 0.1 * grad.square().mean()

    def extra(model):
        x = torch.ones(4, 4, dtype=next(model.parameters()).dtype)
        model.eval()
        return {"saliency": Saliency(model).attribute(x, target=0)}

    return Program(
        make=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        batches=vectors(4),
        loss=loss,
        extra=extra,
    )
