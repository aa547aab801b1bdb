"""Saving, loading, copying and evaluating between steps, and training outside the main thread."""

import copy
import io
import pickle

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import mirror
from tests.oracle import finishes
from tests.programs.catalogue import ON_HOST, Net, Place, adam, features, program, sgd


def _through_file(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@program(apart=ON_HOST)
def state_goes_to_a_plain_model_and_back_in_mid_training(place):
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
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    losses += place.train(model, optimizer)
    return losses, plain, plain_optimizer, model, optimizer


@program
def training_goes_back_to_an_earlier_state(place):
    """The best state so far, kept by deepcopy, is loaded again."""

    model = place.put(Net())
    optimizer = adam(model)
    place.train(model, optimizer)
    best = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    losses = place.train(model, optimizer)
    model.load_state_dict(best[0])
    optimizer.load_state_dict(best[1])
    return losses, place.train(model, optimizer), model, optimizer


@program(apart=ON_HOST, how=["pickle", "torch.save", "deepcopy"])
def a_model_and_its_optimizer_are_copied_in_mid_training(place, how):
    """One copy of both: the copied optimizer steps the copied parameters."""

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


@program
def a_pickled_model_is_mirrored_again(place):
    model = place.put(Net())
    place.train(model, sgd(model))
    model = place.put(pickle.loads(pickle.dumps(model)))
    optimizer = sgd(model)
    return place.train(model, optimizer), model, optimizer


@program(mode=[torch.no_grad, torch.inference_mode])
def evaluation_between_steps(place, mode):
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.LayerNorm(6), nn.Linear(6, 3))
    place.put(model)
    model[1].p = 0.0
    optimizer = sgd(model)
    losses, metrics = [], []

    def evaluate(x, y):
        with mode():
            out = model(x)
            return {
                "loss": F.cross_entropy(out, y),
                "right": (out.argmax(1) == y).float().mean(),
                "grad": torch.tensor(float(out.requires_grad)),
            }

    for _ in range(3):
        losses += place.train(model, optimizer, sizes=(7, 1))
        model[1].p = 0.5
        model.eval()
        metrics += [place.step(evaluate, *batch) for batch in features((5, 2, 1))]
        with mode():
            metrics += [place.step(evaluate, *batch) for batch in features((5, 2, 1))]
        model.train()
        model[1].p = 0.0
    return losses, metrics, model, optimizer


@program
def checking_replicas_in_inference_mode_leaves_training_as_it_was(place):
    model = place.put(Net())
    optimizer = sgd(model)
    losses = place.train(model, optimizer)
    if place.strategy is not None:
        with torch.inference_mode():
            place.strategy.check_replicas()
    return losses, place.train(model, optimizer), model, optimizer


@program(ways=["loop"])
def outputs_of_inference_mode_are_what_one_device_gives(place):
    model = place.put(Net())
    with torch.inference_mode():
        out = model(torch.ones(5, 6))
    return out, out.is_inference(), place.train(model, sgd(model)), model


@program
def training_outside_the_main_thread(place):
    model = place.put(Net())
    optimizer = sgd(model)
    losses, error, _ = finishes(lambda: place.train(model, optimizer))
    if error is not None:
        raise error
    return losses, place.train(model, optimizer), model, optimizer
