"""What the process has once is each replica's own, under every schedule, on any GPUs.

Each replica sets another value, meets the others twice in the context, and leaves it. "late" does
so first in the third run, when replicas that may overlap have begun to.
"""

import contextlib
import logging
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import mirror
from tests.gpu.fake import FakeGpus
from tests.gpu.programs import names
from tests.pairs import each_once, pairwise
from tests.toy_models import replica_id

N = (2, 3)
GPUS = {"distinct": names, "shared": lambda n: ["cuda:0"] * n}
SCHEDULES = ("auto", "staggered", "lockstep")
IS_SET = (True, False, True)  # by replica
KERNELS = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@pytest.fixture(autouse=True)
def assignable_flags(monkeypatch):
    """Allows to assign to flags, which torch's own helpers for tests forbid in this process."""
    backends = getattr(torch.backends, "m", torch.backends)
    monkeypatch.setitem(vars(backends), "__allow_nonbracketed_mutation_flag", True)


def meet():
    mirror.get_replica_context().merge_call(lambda strategy: None)


@contextlib.contextmanager
def setting(set_value, value, before):
    set_value(value)
    try:
        yield
    finally:
        set_value(before)


def of_function(set_value, get, values):
    return lambda r: setting(set_value, values[r], get()), get, values


def of_attribute(owner, name):
    values = tuple(value is not getattr(owner, name) for value in IS_SET)
    return of_function(lambda v: setattr(owner, name, v), lambda: getattr(owner, name), values)


@contextlib.contextmanager
def filtering(action):
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        yield


def kernels():
    backends = torch.backends.cuda
    return (
        backends.math_sdp_enabled(),
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
    )


# A context for replica r, what it sets, and that by replica.
FLAGS = {
    "default dtype": of_function(
        torch.set_default_dtype,
        torch.get_default_dtype,
        (torch.float64, torch.float32, torch.float16),
    ),
    "deterministic": of_function(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, IS_SET
    ),
    "matmul precision": of_function(
        torch.set_float32_matmul_precision,
        torch.get_float32_matmul_precision,
        ("high", "highest", "medium"),
    ),
    "anomaly mode": (
        lambda r: torch.autograd.set_detect_anomaly(IS_SET[r]),
        torch.is_anomaly_enabled,
        IS_SET,
    ),
    "sdpa_kernel": (
        lambda r: sdpa_kernel(KERNELS[r]),
        kernels,
        ((True, False, False), (False, True, False), (False, False, True)),
    ),
    "cudnn.flags": (
        lambda r: torch.backends.cudnn.flags(enabled=True, benchmark=IS_SET[r]),
        lambda: torch.backends.cudnn.benchmark,
        IS_SET,
    ),
    "mkldnn.flags": (
        lambda r: torch.backends.mkldnn.flags(IS_SET[r], allow_tf32=None),
        lambda: torch.backends.mkldnn.enabled,
        IS_SET,
    ),
    "an assigned flag": of_attribute(torch.backends.cudnn, "deterministic"),
    "a flag of cuBLAS": of_attribute(torch.backends.cuda.matmul, "allow_tf32"),
    "number of threads": of_function(torch.set_num_threads, torch.get_num_threads, (3, 1, 2)),
    "filters of warnings": (
        lambda r: filtering(("error", "ignore", "always")[r]),
        lambda: warnings.filters[0][0] if warnings.filters else None,
        ("error", "ignore", "always"),
    ),
}


def strategies(gpus, n, schedule):
    """Returns a strategy, and whether its replicas overlap from the second run on."""
    if gpus == "simulated":
        return mirror.MirroredStrategy(["cpu"] * n, schedule=schedule), False
    strategy = mirror.MirroredStrategy(GPUS[gpus](n), "naive", schedule=schedule)
    is_shared = gpus == "shared"
    return strategy, schedule == "staggered" or (schedule == "auto" and not is_shared)


def comes(condition):
    """Waits until a condition holds; returns False if that takes seconds."""
    pause = threading.Event()
    return any(condition() or pause.wait(0.001) for _ in range(5000))


def overlapping(strategy, n):
    """Runs until the replicas overlap; returns what makes sure that they do."""
    barrier = threading.Barrier(n, timeout=30)
    for _ in range(2):
        strategy.run(lambda: None)
    strategy.run(barrier.wait)
    return barrier.wait


@pairwise(flag=FLAGS, schedule=SCHEDULES, gpus=[*GPUS, "simulated"], n=N, late=[True, False])
def test_a_flag_that_replicas_set_is_each_ones_own(flag, schedule, gpus, n, late):
    context, read, values = FLAGS[flag]
    with FakeGpus(n):
        before = read()
        strategy, overlaps = strategies(gpus, n, schedule)
        with strategy:
            # Replicas wait for no other one to set filters: see below.
            is_late = late and overlaps and flag != "filters of warnings"
            wait = overlapping(strategy, n) if is_late else bool
            seen = {}

            def step():
                r = replica_id()
                seen[r] = []
                wait()
                with context(r):
                    seen[r].append(read())
                    for _ in range(2):
                        meet()
                        seen[r].append(read())
                seen[r].append(read())

            for _ in range(2):
                strategy.run(step)
                wait = bool  # in turns, one replica would wait in vain
                assert read() == before
                assert seen == {r: [values[r]] * 3 + [before] for r in range(n)}


def test_a_cache_of_weights_is_each_replicas_own():
    with FakeGpus(2), mirror.MirroredStrategy(names(2), "naive") as strategy:
        model = strategy.mirror(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)))

        def step():
            seen = [model.weight]
            with parametrize.cached():
                seen = [model.weight]
                meet()
                return seen[0] is model.weight, seen[0]

        are_cached, weights = strategy.run(step)
        assert are_cached.values == (True, True)
        assert weights.values[0] is not weights.values[1]
    assert parametrize._cache_enabled == len(parametrize._cache) == 0


class Net(nn.Module):
    """Dropout on the device of the batch; on demand, LayerDrop by a draw of the CPU, and casts."""

    def __init__(self, p=0.5, *, draws=False):
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(8, 8), nn.Linear(8, 4), nn.Dropout(p)
        self.draws = draws

    def forward(self, x):
        keep = torch.rand(()).item() < 0.5 if self.draws else 1.0
        return self.last(self.dropout(torch.tanh(self.first(x))) * keep)


def train(devices, step_of, *, seed=3, steps=4, before_run=lambda: None, **options):
    """Trains a model; returns losses, parameters and the state of the CPU's generator."""
    p = options.pop("p", 0.5)
    draws = options.pop("draws", False)
    with mirror.MirroredStrategy(devices, **options) as strategy:
        torch.manual_seed(1)
        model = strategy.mirror(Net(p, draws=draws))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(12, 8)
        torch.manual_seed(seed)
        parts = x.chunk(len(devices))
        parts = [part.to(device) for part, device in zip(parts, devices, strict=True)]
        step = step_of(model, optimizer)
        losses = []
        for _ in range(steps):
            before_run()
            losses.append(strategy.reduce("mean", strategy.run(step, (mirror.PerReplica(parts),))))
        values = [p.detach().cpu().clone() for p in model.parameters()]
        return [loss.item() for loss in losses], values, torch.get_rng_state()


def same(one, other):
    return one[0] == other[0] and all(map(torch.equal, [*one[1], one[2]], [*other[1], other[2]]))


def plain_step(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def checkpointing(use_reentrant):
    def step_of(model, optimizer):
        def step(x):
            optimizer.zero_grad()
            x = x.requires_grad_(use_reentrant)
            loss = checkpoint(model, x, use_reentrant=use_reentrant).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return step_of


def with_teacher(model, optimizer):
    """Modes: eval() and train() in a step, between which replicas meet twice."""
    step = plain_step(model, optimizer)

    def eval_and_step(x):
        model.eval()
        for _ in range(2):
            assert not model.dropout.training
            meet()
        assert not model.dropout.training
        model.train()
        assert model.dropout.training
        meet()
        assert model.dropout.training
        return step(x)

    return eval_and_step


def seeding(model, optimizer):
    """Seeds all generators in the step, meets, and draws."""
    step = plain_step(model, optimizer)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(17)
        expected = torch.cat([torch.rand(3, device="cuda:0").cpu() for _ in range(3)])

    def seed_and_step(x):
        torch.manual_seed(17)
        first = torch.rand(3, device=x.device)
        meet()
        second = torch.rand(3, device=x.device)
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.rand(5, device=x.device)
            meet()
        drawn = torch.cat([first, second, torch.rand(3, device=x.device)])
        assert torch.equal(drawn.cpu(), expected)
        return step(x)

    return seed_and_step


def with_autocast(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            h = model.first(x)
            assert not torch.is_autocast_cache_enabled()
            loss = model.first(torch.tanh(h)).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# Of each: the step, options of the model, and whether it draws from the CPU's generator.
STEPS = {
    "layers dropped": (plain_step, {"p": 0.0, "draws": True}, True),
    "checkpoints": (checkpointing(use_reentrant=False), {"p": 0.0}, False),
    "checkpoints that draw": (checkpointing(False), {"p": 0.0, "draws": True}, True),
    "reentrant checkpoints": (checkpointing(use_reentrant=True), {"p": 0.0, "draws": True}, True),
    "modes": (with_teacher, {"p": 0.0}, False),
}


@each_once(step=STEPS, schedule=SCHEDULES, gpus=GPUS, n=N)
def test_a_step_has_the_bits_and_the_generator_of_simulated_devices(
    step, schedule, gpus, n, caplog
):
    step_of, options, draws = STEPS[step]
    wanted = train(["cpu"] * n, step_of, **options)
    caplog.set_level(logging.INFO, "mirror")
    for _ in range(2):
        with FakeGpus(n), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _, overlaps = strategies(gpus, n, schedule)
            found = train(GPUS[gpus](n), step_of, backend="naive", schedule=schedule, **options)
        assert same(found, wanted)
        if overlaps:
            assert sum("take turns" in str(one.message) for one in said) == draws
    if overlaps and not draws:
        assert "the replicas take turns" in caplog.text


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_after_checkpoints_that_draw_the_generator_is_where_one_device_leaves_it(use_reentrant):
    one = train(["cpu"], checkpointing(use_reentrant), draws=True, p=0.0)
    found = []
    with FakeGpus(2):
        for _ in range(4):
            with pytest.warns(UserWarning, match=r"take turns.* drew random numbers"):
                found.append(
                    train(
                        names(2), checkpointing(use_reentrant), draws=True, p=0.0, backend="naive"
                    )
                )
    assert all(same(each, found[0]) for each in found)
    assert torch.equal(found[0][2], one[2])


@each_once(step=[plain_step, checkpointing(False), seeding], schedule=SCHEDULES, gpus=GPUS, n=N)
@pytest.mark.filterwarnings("ignore:.*take turns")
def test_dropout_on_gpus_is_reproducible_bit_for_bit(step, schedule, gpus, n):
    found = []
    with FakeGpus(n):
        for seed in (3, 3, 4):
            options = {"backend": "naive", "schedule": schedule, "seed": seed}
            found.append(train(GPUS[gpus](n), step, **options))
    assert same(found[0], found[1])
    assert found[0][0] != found[2][0] or step is seeding


@pytest.mark.filterwarnings("ignore:.*take turns", "ignore:.*has a GIL")
@pairwise(schedule=[*SCHEDULES, "parallel"], gpus=GPUS)
def test_what_a_replica_draws_depends_on_no_other_one(schedule, gpus):
    """From its GPU's generator and the CPU's; both are then where one device leaves them."""

    def draw(counts):
        drawn = {}

        def fn():
            r, device = replica_id(), mirror.get_replica_context().device
            drawn[r] = []
            for _ in range(2):
                drawn[r] += [torch.rand(counts[r], device=device).cpu(), torch.rand(counts[r])]
                meet()

        torch.manual_seed(3)
        with mirror.MirroredStrategy(GPUS[gpus](2), "naive", schedule=schedule) as strategy:
            strategy.run(fn)
        return drawn, torch.get_rng_state(), torch.cuda.get_rng_state(0)

    with FakeGpus(2):
        one, other = draw([2, 2]), draw([4, 2])
        torch.manual_seed(3)
        for _ in range(2):
            torch.rand(2, device="cuda:0"), torch.rand(2)
        assert all(map(torch.equal, one[0][1], other[0][1]))
        assert torch.equal(one[1], torch.get_rng_state())
        assert torch.equal(one[2], torch.cuda.get_rng_state(0))
        assert not torch.equal(one[0][0][0], one[0][1][0])


@pytest.mark.filterwarnings("ignore:.*take turns")
@pairwise(schedule=SCHEDULES, gpus=GPUS)
def test_a_fork_of_all_generators_is_each_replicas_own(schedule, gpus):
    drawn = []

    def fn():
        device = mirror.get_replica_context().device
        drawn.append(torch.rand((), device=device).item())
        with torch.random.fork_rng(range(2)):
            torch.rand(5, device=device)
            meet()
        drawn.append(torch.rand((), device=device).item())

    options = {"backend": "naive", "schedule": schedule}
    with FakeGpus(2), mirror.MirroredStrategy(GPUS[gpus](2), **options) as strategy:
        torch.manual_seed(3)
        for _ in range(3):
            strategy.run(fn)
    assert len(set(drawn)) == len(drawn) == 12


@pytest.mark.parametrize("schedule", ["staggered", "parallel"])
def test_replicas_of_one_gpu_that_draw_from_its_generator_take_turns(schedule):
    """Their streams are their own, as under "lockstep"."""
    options = {"backend": "naive", "p": 0.5}
    with FakeGpus(1):
        wanted = train(["cuda:0"] * 3, plain_step, schedule="lockstep", **options)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = train(["cuda:0"] * 3, plain_step, schedule=schedule, **options)
    assert same(found, wanted)
    told = [str(one.message) for one in said if "take turns" in str(one.message)]
    assert len(told) == 1
    assert "torch's generator of cuda:0" in told[0]


def test_autocast_has_the_same_bits_however_replicas_overlap():
    with FakeGpus(2):
        found = [train(names(2), with_autocast, backend="naive", p=0.0) for _ in range(2)]
    assert same(*found)


@pytest.mark.parametrize("gpus", GPUS)
def test_an_ordinary_training_takes_no_turns(gpus, caplog):
    """Dropout of GPUs, a mode that does not change, lazy layers, loaders, flags as they were."""
    caplog.set_level(logging.INFO, "mirror")
    data = torch.utils.data.TensorDataset(torch.randn(24, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
    with FakeGpus(2), mirror.MirroredStrategy(GPUS[gpus](2), "naive") as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.5), nn.LazyLinear(4))
            optimizer = torch.optim.AdamW(model.parameters())

        def step(batch):
            model.train()
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.benchmark = False
            optimizer.zero_grad()
            with torch.no_grad():
                model(batch[0])
            loss = model(batch[0]).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for _ in range(3):
            for batch in strategy.distribute_dataset(loader):
                strategy.run(step, (batch,))
        if gpus == "distinct":
            strategy.run(threading.Barrier(2, timeout=30).wait)
    assert "take turns" not in caplog.text


def test_a_replica_that_sets_a_flag_waits_until_the_others_have_stopped():
    with FakeGpus(3), mirror.MirroredStrategy(names(3), "naive") as strategy:
        wait, done = overlapping(strategy, 3), [False] * 3
        is_waiting = threading.Event()
        lockstep = strategy._group.runner.locksteps[0]

        def step():
            wait()
            if replica_id() == 1:
                is_waiting.set()
                with torch.backends.cudnn.flags(benchmark=True):
                    assert done == [True, False, True]
                    meet()
                return
            assert is_waiting.wait(30)
            assert comes(lambda: 1 in lockstep._queue.runnable)  # it waits for its turn
            assert not torch.backends.cudnn.benchmark
            done[replica_id()] = True
            meet()
            assert not torch.backends.cudnn.benchmark

        strategy.run(step)


def test_a_failing_replica_releases_one_that_waits_for_its_turn():
    with FakeGpus(2), mirror.MirroredStrategy(names(2), "naive") as strategy:
        wait = overlapping(strategy, 2)
        lockstep = strategy._group.runner.locksteps[0]

        def step():
            wait()
            if replica_id() == 1:
                with torch.backends.cudnn.flags(benchmark=True):
                    meet()
            assert comes(lambda: 1 in lockstep._queue.runnable)
            raise ValueError("planted")

        with pytest.raises(ValueError, match="planted"):
            strategy.run(step)
        assert not torch.backends.cudnn.benchmark
        assert strategy.run(replica_id).values == (0, 1)


def test_filters_of_warnings_are_kept_though_replicas_enter_them_at_once():
    before = warnings.filters
    with FakeGpus(2), mirror.MirroredStrategy(names(2), "naive") as strategy:
        wait, are_within = overlapping(strategy, 2), [threading.Event(), threading.Event()]

        def step():
            wait()
            r = replica_id()
            if r == 0:
                assert are_within[1].wait(30)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                are_within[r].set()
                assert are_within[0].wait(30)
                if r == 0:  # the other one, which came first, leaves first
                    meet()
            if r == 1:
                meet()

        strategy.run(step)
        assert warnings.filters is before
        assert strategy.run(threading.get_ident).values[0] == threading.get_ident()  # in turns


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn(p.shape).to(p.device), alpha=0.01)
        return result


@each_once(gpus=[*GPUS, None], state=["replicated", "sharded"], schedule=SCHEDULES)
def test_a_step_that_draws_from_the_generator_of_the_cpu_is_refused(gpus, state, schedule):
    devices = ["cpu"] * 2 if gpus is None else GPUS[gpus](2)
    schedule = "lockstep" if gpus is None else schedule
    with (
        FakeGpus(2),
        mirror.MirroredStrategy(
            devices, "auto" if gpus is None else "naive", schedule=schedule, optimizer_state=state
        ) as strategy,
    ):
        model = strategy.mirror(nn.Linear(8, 4))
        optimizer = Noisy(model.parameters(), lr=0.1)
        parts = [torch.ones(2, 8).to(device) for device in devices]
        step = plain_step(model, optimizer)
        with pytest.raises(mirror.StrategyError, match="step draws random numbers"):
            strategy.run(step, (mirror.PerReplica(parts),))
        strategy.check_replicas()


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_a_stream_that_a_step_sets_is_no_longer_set_after_the_run(schedule):
    with FakeGpus(2) as gpus:
        with mirror.MirroredStrategy(names(2), "naive", schedule=schedule) as strategy:

            def fn():
                device = mirror.get_replica_context().device
                torch.cuda.set_stream(torch.cuda.Stream(device))

            strategy.run(fn)
        for device in gpus.devices:
            assert torch.cuda.current_stream(device) is gpus.streams.default_stream(device)


def test_replicas_of_one_gpu_that_seed_in_a_step_keep_streams_of_their_own():
    """A seed inside ``fork_rng``, which restores the replica's own stream."""

    def step():
        with torch.random.fork_rng():
            torch.manual_seed(3)
        return torch.rand(4, device="cuda:0").cpu()

    with FakeGpus(1), mirror.MirroredStrategy(["cuda:0"] * 2, "naive") as strategy:
        for _ in range(2):
            first, second = strategy.local_results(strategy.run(step))
            assert not torch.equal(first, second)


def test_a_flag_that_stands_for_others_may_be_set_where_they_differ():
    cudnn = torch.backends.cudnn
    if not hasattr(cudnn, "rnn"):
        pytest.skip("this torch has one flag for all of cuDNN")
    before = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = "tf32", "ieee"

    def step():
        cudnn.allow_tf32 = True

    try:
        with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
            strategy.run(step)
    finally:
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before
