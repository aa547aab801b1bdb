"""Trainings over parameter servers resume after a restart, or a lost server or worker."""

import itertools
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.errors import CheckpointError, ServerLostError, StrategyError
from mirror.train import Hook, SaveEvery, StopAtStep, StopOnNan, Training
from tests.pairs import each_once
from tests.train.loop.counting import Counting, Seen, weights_saved


def batches_of(count):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 3, generator=generator), torch.arange(4) % 2) for _ in range(count)]


def adam_over(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def trained_plainly(count):
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = adam_over(model.parameters())
    losses = []
    for x, y in batches_of(count):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def trained_over_servers(folder, count, fetches, hooks, **options):
    """Trains as README writes it; returns the model, the losses of all hooks, and the training."""
    torch.manual_seed(1)
    strategy = mirror.ParameterServerStrategy(**options)
    with strategy, strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = adam_over(model.parameters())
        manager = mirror.CheckpointManager(
            mirror.Checkpoint(model=model, optimizer=optimizer), folder
        )

        def step(batch):
            x, y = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = []

        class Losses(Hook):
            def after_step(self, training):
                losses.append(training.value("loss"))

        with Training(strategy, checkpoint=manager, hooks=[Losses(), *hooks]) as training:
            coordinator = mirror.ClusterCoordinator(strategy)
            for batch in training.batches(batches_of(99)[training.step :]):
                loss = coordinator.schedule(step, args=(batch,))
                training.log(loss=loss.fetch() if fetches else loss)
    return model, losses, training


@pytest.mark.filterwarnings("ignore:the training goes on after step 4")
@each_once(fetches=[False, True], num_servers=[1, 2, 3])
def test_one_worker_trains_as_one_device_over_a_restart(tmp_path, num_servers, fetches):
    plain, losses = trained_plainly(11)
    found = []
    for last_step, servers in ((4, num_servers), (11, 4 - num_servers)):
        hooks = [StopOnNan(), SaveEvery(3), StopAtStep(last_step)]
        model, some, training = trained_over_servers(
            tmp_path, 11, fetches, hooks, num_servers=servers
        )
        found += some
        assert training.step == last_step
    assert training.first_step == 4
    torch.testing.assert_close(found, losses)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_killed_workers_steps_count_once(tmp_path):
    with Counting(tmp_path, num_servers=2, num_workers=2) as program:
        own = program.step

        def step(k):
            mark = tmp_path / f"killed-{k}"
            if k in (3, 8) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return own(k)

        training = program.train([SaveEvery(5), StopAtStep(20)], step)
        assert (training.step, program.weight) == (20, 20)
        assert program.strategy.report().num_retried == 2
    assert weights_saved(tmp_path) == {5: 5, 10: 10, 15: 15, 20: 20}


class KillServer(Seen):
    """Kills a server after a step; or just before a save, which then finds it gone."""

    def __init__(self, at, server, is_to_save):
        def kill(training):
            training.strategy._session.actors.servers[server].kill()
            if is_to_save:
                training.save()

        super().__init__(at, kill)


@pytest.mark.filterwarnings("ignore:the training goes on after step")
@each_once(is_to_save=[False, True], server=[0, 1])
def test_after_a_lost_server_a_training_goes_on_from_the_checkpoint(tmp_path, server, is_to_save):
    with Counting(tmp_path, num_servers=2, num_workers=2) as program:
        kill = KillServer(6, server, is_to_save)
        with pytest.raises(ServerLostError, match=f"server {server} of 2 is lost.*restore"):
            program.train([SaveEvery(4), kill, StopAtStep(12)])
        assert kill.errors == [ServerLostError]
    assert weights_saved(tmp_path) == {4: 4}
    with Counting(tmp_path, num_servers=3, num_workers=1) as program:
        training = program.train([SaveEvery(4), StopAtStep(12)])
        assert (training.first_step, training.step, program.weight) == (4, 12, 12)
    assert weights_saved(tmp_path) == {4: 4, 8: 8, 12: 12}


class KillInState:
    """Kills a server while a checkpoint takes the states of its objects."""

    def __init__(self, strategy):
        self.strategy = strategy

    def state_dict(self):
        self.strategy._session.actors.servers[0].kill()
        return {}

    def load_state_dict(self, state):
        pass


def test_a_server_lost_within_a_save_is_named(tmp_path):
    strategy = mirror.ParameterServerStrategy()
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = adam_over(model.parameters())

    def step(k):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        return k

    checkpoint = mirror.Checkpoint(kill=KillInState(strategy), optimizer=optimizer)
    manager = mirror.CheckpointManager(checkpoint, tmp_path)
    with (
        strategy,
        pytest.raises(ServerLostError, match="server 0 of 1 is lost"),
        Training(strategy, checkpoint=manager, hooks=[StopAtStep(3)]) as training,
    ):
        for k in training.batches(range(9)):
            mirror.ClusterCoordinator(strategy).schedule(step, args=(k,))
    assert manager.latest is None


def make_endless(context):
    return itertools.count(10 * context.input_pipeline_id)


def test_a_per_worker_dataset_hands_out_what_a_step_takes_for_its_batch(tmp_path):
    with Counting(tmp_path, num_workers=2) as program:
        coordinator = mirror.ClusterCoordinator(program.strategy)
        data = coordinator.create_per_worker_dataset(make_endless)
        seen = Seen()
        training = program.train([seen, StopAtStep(12)], batches=data)
        assert (training.step, program.weight, len(set(seen.values))) == (12, 12, 12)
        with (
            pytest.raises(StrategyError, match=r"no passes here; got epochs=2.*StopAtStep"),
            Training(program.strategy) as training,
        ):
            training.batches(data, epochs=2)

    with Counting(tmp_path) as program:
        coordinator = mirror.ClusterCoordinator(program.strategy)
        before = coordinator.create_per_worker_dataset(make_endless)
        with pytest.warns(
            UserWarning, match=r"after step 12.*worker's dataset starts again.*first"
        ):
            program.train([StopAtStep(15)], batches=before)
    with Counting(tmp_path) as program:
        hooks = [StopAtStep(18)]
        with Training(program.strategy, checkpoint=program.manager, hooks=hooks) as training:
            coordinator = mirror.ClusterCoordinator(program.strategy)
            first, own = training.first_step, program.step
            inside = coordinator.create_per_worker_dataset(lambda: itertools.count(first))
            for iterator in training.batches(iter(inside)):
                training.log(k=coordinator.schedule(lambda it: own(next(it)), (iterator,)))
        assert (training.value("k"), program.weight) == (17, 18)


def test_gradients_that_wait_at_a_synchronous_checkpoint_are_reported(tmp_path):
    with (
        Counting(tmp_path, num_workers=2, sync=True) as program,
        pytest.warns(UserWarning, match=r"of step 3 lacks 1 gradients.*multiples of.*=2"),
    ):
        program.train([StopAtStep(3)])


def test_a_checkpoint_of_other_objects_leaves_nothing_behind(tmp_path):
    mirror.CheckpointManager(mirror.Checkpoint(other=1), tmp_path).save(3)
    with Counting(tmp_path) as program:
        with (
            pytest.raises(CheckpointError),
            Training(program.strategy, checkpoint=program.manager),
        ):
            pass
        assert program.strategy.coordinator._session.queue.listeners == []
