"""Training outside the main thread."""

import copy
import threading

import pytest

from tests.oracle import assert_same, finishes
from tests.training.programs import Net, Place, features, sgd


def test_training_outside_the_main_thread(same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)
        losses, error, _ = finishes(lambda: place.train(model, optimizer))
        if error is not None:
            raise error
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


@pytest.mark.parametrize("in_run", [False, True])
def test_two_strategies_train_in_two_threads(in_run, make_strategy):
    batches = [features(), features()]
    models = [Net(), Net()]
    expected = []
    for model, data in zip(copy.deepcopy(models), batches, strict=True):
        losses = Place().train(model, sgd(model), data=lambda sizes, data=data: data)
        expected.append((losses, model.state_dict()))

    def train(i):
        place = Place(make_strategy(2), in_run)
        model = place.put(models[i])
        losses = place.train(model, sgd(model), data=lambda sizes: batches[i])
        return losses, model.state_dict()

    outcomes = [None, None]
    start = threading.Barrier(2)

    def target(i):
        start.wait()
        outcomes[i] = finishes(lambda: train(i))

    threads = [threading.Thread(target=target, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for outcome, want in zip(outcomes, expected, strict=True):
        result, error, _ = outcome
        assert error is None, error
        assert_same(result, want)
