"""Saving, loading and copying in mid-training."""

import copy
import io
import pickle

import pytest
import torch
import torch.utils.checkpoint

import mirror
from tests.training.programs import Net, Place, adam, sgd


def _through_file(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def test_state_goes_to_a_plain_model_and_back_in_mid_training(same):
    def script(place):
        model = place.put(Net())
        optimizer = adam(model)
        losses = place.train(model, optimizer)
        state = _through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        assert {type(t) for t in state["model"].values()} == {torch.Tensor}

        plain = Net()
        plain.load_state_dict(state["model"])
        plain_optimizer = adam(plain)
        plain_optimizer.load_state_dict(state["optimizer"])
        losses += Place().train(plain, plain_optimizer)
        # What the plain copy learned goes back into the same model and optimizer.
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(plain_optimizer.state_dict())
        losses += place.train(model, optimizer)
        return losses, plain, plain_optimizer, model, optimizer

    same(script)


def test_training_goes_back_to_an_earlier_state(same):
    """The best state so far, kept by deepcopy, is loaded again."""

    def script(place):
        model = place.put(Net())
        optimizer = adam(model)
        place.train(model, optimizer)
        best = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        losses = place.train(model, optimizer)
        model.load_state_dict(best[0])
        optimizer.load_state_dict(best[1])
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
def test_a_model_and_its_optimizer_are_copied_in_mid_training(how, same):
    """One copy of both: the copied optimizer steps the copied parameters."""

    def script(place):
        model = place.put(Net())
        optimizer = adam(model)
        losses = place.train(model, optimizer)
        both = {"model": model, "optimizer": optimizer}
        if how == "pickle":
            copied = pickle.loads(pickle.dumps(both))
        elif how == "torch.save":
            copied = _through_file(both, weights_only=False)
        else:
            copied = copy.deepcopy(both)
        assert not mirror.is_mirrored(copied["model"])
        losses += place.train(model, optimizer)
        losses += Place().train(copied["model"], copied["optimizer"])
        return losses, model, optimizer, copied["model"], copied["optimizer"]

    same(script)


def test_a_pickled_model_is_mirrored_again(same):
    def script(place):
        model = place.put(Net())
        place.train(model, sgd(model))
        model = place.put(pickle.loads(pickle.dumps(model)))
        optimizer = sgd(model)
        return place.train(model, optimizer), model, optimizer

    same(script)
