"""Buckets: cut from the back, reduced one at a time as they come, hidden by what is left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.tools.planning.overlap import after_backward, beside_backward, buckets_of

sizes = st.lists(st.floats(1, 1e9), min_size=1, max_size=40)


def one_second_each(num_bytes):
    return 1.0


def a_second_a_byte(num_bytes):
    return num_bytes


def test_buckets_are_cut_from_the_last_parameter_on():
    assert buckets_of([4, 3, 1, 1], 3) == [(0.5, 2), (0.75, 3), (1.0, 4)]


def test_a_gradient_larger_than_a_bucket_has_one_of_its_own():
    assert buckets_of([1, 9, 1], 3) == [(1 / 3, 1), (2 / 3, 9), (1.0, 1)]


@given(sizes, st.floats(1, 1e10))
def test_buckets_hold_every_gradient_once_and_at_most_so_much(sizes_bytes, most):
    buckets = buckets_of(sizes_bytes, most)
    assert sum(size for _, size in buckets) == pytest.approx(sum(sizes_bytes))
    assert max(size for _, size in buckets) <= max(most, *sizes_bytes, 0)
    assert [when for when, _ in buckets] == sorted(when for when, _ in buckets)
    assert buckets[-1][0] == 1


def test_what_fits_into_the_backward_pass_is_hidden_but_for_the_last():
    # 8 seconds of backward, a bucket every 2, each reduced in 1: |..[1]..[1]..[1]..|[1]
    buckets = buckets_of([1, 1, 1, 1], 1)
    taken = beside_backward(buckets, 8.0, one_second_each)
    assert (taken.seconds, taken.exposed_seconds) == (4, 1)
    assert taken.hidden_share == 0.75


def test_a_channel_that_cannot_keep_up_is_never_idle():
    # The first arrives after 1 of 4 seconds, and four of 3 seconds follow each other: to 13.
    buckets = buckets_of([3, 3, 3, 3], 3)
    taken = beside_backward(buckets, 4.0, a_second_a_byte)
    assert (taken.seconds, taken.exposed_seconds) == (12, 9)


def test_one_reduction_behind_hides_nothing():
    taken = after_backward(7, a_second_a_byte)
    assert (taken.seconds, taken.exposed_seconds, taken.hidden_share) == (7, 7, 0)


def test_without_a_reduction_nothing_is_said_to_be_hidden():
    assert beside_backward([(1.0, 5)], 1.0, lambda _: 0.0).hidden_share is None


@given(sizes, st.floats(1, 1e9), st.floats(0, 10), st.floats(1e-12, 1e-3))
def test_buckets_never_take_longer_than_the_same_behind(sizes_bytes, most, backward, slope):
    def all_reduce(num_bytes):
        return slope * num_bytes  # without a latency, which every bucket pays

    beside = beside_backward(buckets_of(sizes_bytes, most), backward, all_reduce)
    behind = after_backward(sum(sizes_bytes), all_reduce)
    assert 0 <= beside.exposed_seconds <= behind.exposed_seconds * (1 + 1e-9)
    assert -1e-9 <= beside.hidden_share <= 1


@given(sizes, st.floats(0, 10), st.floats(0, 10))
def test_a_longer_backward_pass_hides_no_less(sizes_bytes, one, other):
    buckets = buckets_of(sizes_bytes, 1e8)
    short, long = sorted((one, other))

    def exposed(backward):
        return beside_backward(buckets, backward, lambda size: 1e-9 * size).exposed_seconds

    assert exposed(long) <= exposed(short) + 1e-9
