"""Lightning's Trainer and Fabric over mirrored devices equal one device."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.compiler.runtime.module_program import ModuleProgram
from mirror.errors import StrategyError
from tests.oracle import assert_same
from tests.pairs import EXHAUSTIVE

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")
classification = torchmetrics.classification

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet():
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def loader():
    draws = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(n, 6, generator=draws), torch.randint(3, (n,), generator=draws))
        for n in (8, 7, 2, 5)  # uneven parts, and a replica that sits out
    ]
    return torch.utils.data.DataLoader(batches, batch_size=None)


class Net(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """Logs in forward and outside: values, a metric, and a collection of them."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.accuracy = classification.MulticlassAccuracy(3, average="micro")
        kinds = [classification.MulticlassAccuracy(3), classification.MulticlassAUROC(3)]
        self.inner = torchmetrics.MetricCollection(kinds, prefix="inner_")

    def forward(self, x, y=None):
        h = self.net(x)
        if y is not None:
            self.inner.update(h.softmax(1), y)
            self.log("norm", h.square().mean(), on_epoch=True, on_step=True)
            self.log_dict({"top": h.abs().mean(), "count": 3.0})
        return h

    def training_step(self, batch, index):
        h = self(*batch)
        loss = F.cross_entropy(h, batch[1])
        self.accuracy(h, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_epoch=True)
        self.log_dict(self.inner, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()


def trainer(strategy, **options):
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"enable_checkpointing": False} | options),
        **({} if strategy is None else {"strategy": strategy}),
    )


def fit(model, strategy, path=None, **options):
    options = {"max_epochs": 2} | options
    by = trainer(strategy, **options)
    by.fit(model, loader(), loader(), ckpt_path=path)
    return by, {key: float(value) for key, value in by.callback_metrics.items()}


@pytest.fixture
def plugin(make_strategy):
    from mirror.lightning import MirroredStrategy

    return lambda: MirroredStrategy(make_strategy(3))


CASES = {
    "clipping": (Net, lambda: {"gradient_clip_val": 0.5}),
    "accumulation": (Net, lambda: {"accumulate_grad_batches": 2}),
    "double": (Net, lambda: {"precision": "64-true"}),
    "manual": (Manual, dict),
    "SWA": (
        Net,
        lambda: {
            "max_epochs": 4,
            "callbacks": [callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)],
        },
    ),
    "EMA": (Net, lambda: {"callbacks": [callbacks.EMAWeightAveraging(decay=0.8)]}),
}


@pytest.mark.parametrize(
    "case",
    ["clipping", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != "clipping")],
)
def test_the_trainer_trains_and_logs_as_on_one_device(case, plugin):
    # A value logged in forward was logged once per replica: the last one's, or their plain mean.
    make, options = CASES[case]
    plain = make()
    model = copy.deepcopy(plain)
    _, expected = fit(plain, None, **options())
    _, logged = fit(model, plugin(), **options())
    assert mirror.is_mirrored(model)
    assert_same(logged, expected)
    assert_same(model.state_dict(), plain.state_dict())


def test_a_program_in_the_scope_with_one_device_is_right(make_strategy):
    plain = Net()
    with make_strategy(3).scope():
        model = Net()
        model.load_state_dict(plain.state_dict())
        _, logged = fit(model, None, devices=1)
    _, expected = fit(plain, None)
    assert_same(logged, expected)
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.slow
def test_checkpoints_are_those_of_one_device(plugin, tmp_path):
    plain = Net()
    start = copy.deepcopy(plain)
    fit(plain, None, max_epochs=4)
    saving = callbacks.ModelCheckpoint(tmp_path, save_last=True)
    fit(start, plugin(), enable_checkpointing=True, callbacks=[saving])
    model = Net()
    by, _ = fit(model, plugin(), tmp_path / "last.ckpt", max_epochs=4)
    assert_same(model.state_dict(), plain.state_dict())
    by.save_checkpoint(tmp_path / "end.ckpt")
    again = Net.load_from_checkpoint(tmp_path / "end.ckpt")
    assert not mirror.is_mirrored(again)
    assert_same(again.state_dict(), model.state_dict(), tolerance=0)


@pytest.mark.slow
def test_one_trainer_fits_validates_predicts_and_fits_again(plugin):
    results = []
    plain = Net()
    for model, strategy in ((plain, None), (copy.deepcopy(plain), plugin())):
        by, _ = fit(model, strategy)
        checked = by.validate(model, loader(), verbose=False)
        inputs = torch.utils.data.DataLoader([x for x, _ in loader()], batch_size=None)
        predicted = by.predict(model, inputs)
        by.fit_loop.max_epochs = 3
        by.fit(model, loader())
        results.append((checked, predicted, model.state_dict()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("as_wrapper", [True, False])
def test_fabric_trains_saves_and_loads_as_on_one_device(as_wrapper, plugin, tmp_path):
    results = []
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    for i, model in enumerate((plain, copy.deepcopy(plain))):
        fabric = lightning.Fabric(accelerator="cpu", **({"strategy": plugin()} if i else {}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
        wrapped, stepper = fabric.setup(model, optimizer)
        batches = fabric.setup_dataloaders(loader())
        losses = []
        for epoch in range(3):
            for number, (x, y) in enumerate(batches):
                with fabric.no_backward_sync(wrapped, enabled=number % 2 == 0):
                    loss = F.cross_entropy(wrapped(x), y)
                    fabric.backward(loss)
                if number % 2:
                    fabric.clip_gradients(wrapped, stepper, max_norm=0.5)
                    stepper.step()
                    stepper.zero_grad()
                losses.append(float(loss))
            state = {"model": wrapped if as_wrapper else model, "optimizer": stepper, "epoch": 0}
            if epoch == 0:
                fabric.save(tmp_path / f"{i}", state)
            elif epoch == 1:
                fabric.load(tmp_path / f"{i}", state)
        results.append((losses, model.state_dict(), optimizer.state_dict()["state"]))
    assert_same(results[1], results[0])


@pytest.fixture
def replays(monkeypatch):
    """The replicas whose calls were replayed."""
    found = []
    call = ModuleProgram.call

    def counted(program, replica_id, *args):
        found.append(replica_id)
        return call(program, replica_id, *args)

    monkeypatch.setattr(ModuleProgram, "call", counted)
    return found


class Layers(Net):
    """Its layers are called from outside of modules, with arguments of three sizes."""

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("kind", "num_replicas"),
    [pytest.param(Net, 3, marks=EXHAUSTIVE), (Manual, 2), (Layers, 1)],
)
def test_compiled_layers_have_the_bits_of_uncompiled_ones(kind, num_replicas, replays, caplog):
    from mirror.lightning import MirroredStrategy

    results = []
    start = kind()
    for options in ({}, {"compile": True}):
        model = copy.deepcopy(start)
        assert not replays
        with mirror.MirroredStrategy(["cpu"] * num_replicas) as strategy:
            _, logged = fit(model, MirroredStrategy(strategy, **options))
        results.append((logged, model.state_dict()))
    assert_same(results[1], results[0], tolerance=0)
    assert {*replays} == {*range(num_replicas)}
    assert not [one for one in caplog.records if "compiled" in one.message]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_fabric_replays_a_compiled_module_and_captures_its_update(num_replicas, replays, caplog):
    from mirror.lightning import MirroredStrategy

    results = []
    start = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    for compiled in (False, True):
        assert not replays
        model = copy.deepcopy(start)
        by = MirroredStrategy(["cpu"] * num_replicas, compile=compiled)
        fabric = lightning.Fabric(accelerator="cpu", strategy=by)
        wrapped, stepper = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        for _ in range(2):
            for x, y in loader():
                stepper.zero_grad()
                fabric.backward(F.cross_entropy(wrapped(x), y))
                stepper.step()
        results.append(model.state_dict())
        by.mirror.close()
    assert_same(results[1], results[0], tolerance=0)
    assert {*replays} == {*range(num_replicas)}
    assert not caplog.records


def test_what_cannot_be_logged_once_is_refused(plugin):
    class Counting(Net):
        def forward(self, x, y=None):
            if y is not None:
                self.log("positive", (y > 0).sum())
            return self.net(x)

        def training_step(self, batch, index):
            return F.cross_entropy(self(*batch), batch[1])

    torch.manual_seed(3)
    with pytest.raises(StrategyError, match=r"Counting.log logs once .* mean over examples"):
        fit(Counting(), plugin())


def test_a_strategy_is_given_or_made():
    from mirror.lightning import MirroredStrategy

    made = MirroredStrategy(["cpu"] * 2, schedule="lockstep")
    assert made.mirror.num_replicas_in_sync == 2
    assert MirroredStrategy(made.mirror).mirror is made.mirror
    with pytest.raises(StrategyError, match="schedule, which it already has"):
        MirroredStrategy(made.mirror, schedule="lockstep")
    made.mirror.close()
