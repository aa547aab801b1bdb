"""Trailers report what each worker contributes, and which worker is at another reduction."""

import pytest
import torch

from mirror.replica.multi_worker.worker_bucket import UsualTrailers, read_trailer, write_trailer


def summed(*trailers):
    return read_trailer(torch.tensor(trailers).sum(0).tolist())


def test_what_workers_have_brought_is_counted():
    trailer = summed(
        write_trailer([1.0, 0.0], 5, 3.0, more=True),
        write_trailer([1.0, 1.0], 5, 4.0, non_finite=True, failed=True),
    )
    assert list(trailer.flags) == [2.0, 1.0]
    assert (trailer.weight, trailer.more, trailer.non_finite, trailer.failed) == (
        7.0,
        1.0,
        1.0,
        1.0,
    )


def test_another_reduction_has_another_mark():
    same = summed(write_trailer([], 21, 1.0), write_trailer([], 21, 1.0))
    assert same.is_marked(21, 2)
    assert not same.is_marked(22, 2)
    assert not same.is_marked(21, 3)
    assert not summed(write_trailer([], 21, 1.0), write_trailer([], 28, 1.0)).is_marked(21, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_usual_tails_are_those_of_workers_that_have_nothing_else_to_say(dtype):
    trailers = UsualTrailers(2, dtype)
    for number in (3, 19, 21):
        for weight in (8.0, 2.5):
            own = torch.frombuffer(bytearray(trailers.own(number, weight)), dtype=dtype)
            assert own.tolist() == write_trailer([1.0, 1.0], number, weight)
            both = own + torch.tensor(write_trailer([1.0, 1.0], number, 4.0))
            assert both.tolist() == trailers.all(number, weight + 4.0, 2)
            assert both.tolist() != trailers.all(number + 1, weight + 4.0, 2)
            assert both.tolist() != trailers.all(number, weight, 2)


def test_usual_tails_of_ever_other_weights_are_not_all_kept():
    trailers = UsualTrailers(1, torch.float32)
    for weight in range(500):
        trailers.own(1, float(weight))
        trailers.all(1, float(weight), 2)
    assert max(len(trailers._own), len(trailers._all)) < 100
