"""Every optimizer and scheduler of PyTorch, and scalers: saved and restored, bit for bit."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.testing._internal.common_optimizers import optim_db

import mirror
from tests.replica.optimizers.test_optim_db import problem

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Run:
    def __init__(self, info, kwargs, n):
        self.model, self.batches, self.loss = problem(info)
        self.strategy = mirror.MirroredStrategy(["cpu"] * n)
        self.strategy.mirror(self.model)
        self.optimizer = info.optim_cls(self.model.parameters(), **kwargs)
        self.checkpoint = mirror.Checkpoint(model=self.model, optimizer=self.optimizer)

    def train(self, batches):
        for batch in batches:

            def closure(batch=batch):
                self.optimizer.zero_grad()
                loss = self.loss(self.model, batch)
                loss.backward()
                return loss

            self.optimizer.step(closure)

    def bits(self):
        found = list(self.model.state_dict().values())
        pending = [self.optimizer.state_dict()]
        while pending:
            value = pending.pop()
            if isinstance(value, torch.Tensor):
                found.append(value.clone())
            elif isinstance(value, (dict, list, tuple)):
                pending += value.values() if isinstance(value, dict) else value
            else:
                found.append(torch.tensor(list(repr(value).encode())))
        return found


QUICK = {"Adam", "LBFGS"}
KINDS = [(getattr(info.optim_cls, "__name__", ""), info) for info in optim_db]
OPTIMIZERS = [
    pytest.param(info, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for name, info in KINDS
]


@pytest.mark.parametrize("info", OPTIMIZERS)
def test_every_optimizer_goes_on_as_if_it_had_not_stopped(info, tmp_path):
    kwargs = info.optim_inputs_func(device="cpu")[-1].kwargs
    whole = Run(info, kwargs, 2)
    with whole.strategy:
        whole.train(whole.batches)
        stopped = Run(info, kwargs, 2)
        with stopped.strategy:
            stopped.train(stopped.batches[:2])
            stopped.checkpoint.save(tmp_path / "c")
            at_stop = stopped.bits()
        for n in (2, 1, 3):
            resumed = Run(info, kwargs, n)
            with resumed.strategy:
                resumed.checkpoint.restore(tmp_path / "c")
                assert same_bits(resumed.bits(), at_stop)
                resumed.train(resumed.batches[2:])
                if n == 2:
                    assert same_bits(resumed.bits(), whole.bits())


def same_bits(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


class Factor:
    """A callable with a state, of which LambdaLR saves the attributes."""

    def __init__(self):
        self.seen = {"steps": 0}

    def __call__(self, epoch):
        self.seen = {"steps": epoch}
        return 0.9**epoch


SCHEDULERS = {
    "LambdaLR": lambda o: lr.LambdaLR(o, Factor()),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, Factor()),
    "StepLR": lambda o: lr.StepLR(o, 2),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 2, 4]),
    "ConstantLR": lambda o: lr.ConstantLR(o),
    "LinearLR": lambda o: lr.LinearLR(o),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.StepLR(o, 1)], [3]),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.StepLR(o, 1)]),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on(name, tmp_path):
    def make():
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
        schedule = SCHEDULERS[name](optimizer)
        return optimizer, schedule, mirror.Checkpoint(o=optimizer, s=schedule)

    def rates(optimizer, schedule, count):
        found = []
        for _ in range(count):
            optimizer.step()
            schedule.step(*[1.0] * (name == "ReduceLROnPlateau"))
            found.append([group["lr"] for group in optimizer.param_groups])
        return found

    optimizer, schedule, checkpoint = make()
    rates(optimizer, schedule, 3)
    checkpoint.save(tmp_path / "c")
    expected = rates(optimizer, schedule, 4)
    optimizer, schedule, checkpoint = make()
    checkpoint.restore(tmp_path / "c")
    assert rates(optimizer, schedule, 4) == expected


def test_every_scheduler_of_torch_is_in_the_list():
    kinds = {
        kind.__name__
        for kind in vars(lr).values()
        if isinstance(kind, type) and issubclass(kind, lr.LRScheduler)
    }
    assert kinds - SCHEDULERS.keys() <= {"LRScheduler", "_LRScheduler"}


@pytest.mark.parametrize("kind", [mirror.amp.GradScaler, torch.amp.GradScaler])
def test_a_scaler_goes_on_mirrored_or_not(kind, tmp_path):
    saved = mirror.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    mirror.Checkpoint(scaler=saved).save(tmp_path / "c")
    other = kind("cpu", init_scale=2.0)
    mirror.Checkpoint(scaler=other).restore(tmp_path / "c")
    assert other.state_dict() == saved.state_dict()


def test_a_scaler_that_is_off_is_not_one_that_is_on(tmp_path):
    mirror.Checkpoint(scaler=mirror.amp.GradScaler("cpu", enabled=False)).save(tmp_path / "c")
    with pytest.raises(mirror.CheckpointError, match="'scaler' cannot be restored"):
        mirror.Checkpoint(scaler=mirror.amp.GradScaler("cpu")).restore(tmp_path / "c")


def test_an_average_of_the_weights_goes_on(tmp_path):
    def make():
        model = nn.Linear(2, 2)
        return model, torch.optim.swa_utils.AveragedModel(model)

    model, average = make()
    average.update_parameters(model)
    mirror.Checkpoint(model=model, average=average).save(tmp_path / "c")
    model, other = make()
    mirror.Checkpoint(model=model, average=other).restore(tmp_path / "c")
    assert torch.equal(other.module.weight, average.module.weight)
    assert other.n_averaged == 1
