"""tests/pairs.py: which cases of a product are quick."""

import itertools
from types import SimpleNamespace

import pytest

from tests.pairs import (
    covering,
    each_once,
    every,
    leave_products_to_exhaustive,
    pairwise,
    quick_of,
    spread,
)


@pytest.mark.parametrize("lengths", [(3, 3), (7, 2, 3, 4), (2, 1, 5), (4, 3, 2)])
def test_all_meetings_are_covered_by_few_cases(lengths):
    def meetings(cases):
        return {m for case in cases for m in itertools.combinations(enumerate(case), 2)}

    chosen = covering(lengths, 2)
    assert meetings(chosen) == meetings(itertools.product(*map(range, lengths)))
    *_, second, longest = sorted(lengths)
    assert len(chosen) <= 1.3 * second * longest


@pytest.mark.parametrize("choose", [pairwise, each_once])
def test_the_rest_of_the_product_is_exhaustive(choose):
    kept = pytest.param("c", marks=pytest.mark.slow)
    _, cases = choose(letter=["a", "b", kept], number=[1, 2], flag=[None, True]).args
    assert len(cases) == len({case.id for case in cases}) == 12
    assert {case.values for case in cases} == {*itertools.product("abc", [1, 2], [None, True])}
    marks = {case.values: {mark.name for mark in case.marks} for case in cases}
    assert all("slow" in marks[values] for values in marks if values[0] == "c")
    rest = [values for values in marks if "exhaustive" in marks[values]]
    assert all("slow" in marks[values] for values in rest)
    assert len(rest) == 12 - (6 if choose is pairwise else 3)


def test_an_axis_may_have_two_parameters():
    named = pytest.param("b", 2, id="second")
    mark = each_once(**{"letter,number": [("a", 1), named]}, flag=[False, True])
    names, cases = mark.args
    assert names == "letter,number,flag"
    quick = [case for case in cases if not case.marks]
    assert [case.values for case in quick] == [("a", 1, False), ("b", 2, True)]
    assert [case.id for case in quick] == ["a-1-False", "second-True"]


def is_quick(param):
    return not getattr(param, "marks", ())


def test_what_is_not_quick_is_exhaustive():
    assert [is_quick(p) for p in quick_of([1, 2, 3], [3])] == [False, False, True]
    assert [is_quick(p) for p in every(2, "abc")] == [True, False, True]
    rest = [p for p in [*quick_of([1, 2, 3], [3]), *every(2, "abc")] if not is_quick(p)]
    assert {frozenset(mark.name for mark in p.marks) for p in rest} == {
        frozenset(["slow", "exhaustive"])
    }


def test_a_quick_value_that_is_none_of_the_values_is_an_error():
    with pytest.raises(AssertionError, match=r"\[4\] are not all among \[1, 2, 3\]"):
        quick_of([1, 2, 3], [4])


@pytest.mark.parametrize("lengths", [(3, 2), (2, 7, 3), (4,), (5, 5)])
def test_every_value_of_a_product_is_in_a_quick_case_about_equally_often(lengths):
    cases = [tuple(enumerate(case)) for case in itertools.product(*map(range, lengths))]
    chosen = spread(cases)
    assert len(chosen) == max(lengths)
    for axis, length in enumerate(lengths):
        times = [sum(case[axis][1] == value for case in chosen) for value in range(length)]
        assert set(times) <= {min(times), min(times) + 1} - {0}


def test_a_product_with_holes_has_every_value():
    holed = [((0, a), (1, b)) for a in range(4) for b in range(4) if a <= b]
    assert {value for case in spread(holed) for value in case} == {
        (axis, value) for axis in range(2) for value in range(4)
    }


def letters_and_numbers(item_marks):
    """Returns the stand-ins of a test's six items, with those marks."""

    class Item:
        def __init__(self, letter, number):
            self.nodeid = f"test_x.py::test_it[{letter}-{number}]"
            self.callspec = SimpleNamespace(_idlist=[letter, number])
            self.marks = [*item_marks]

        def iter_markers(self):
            return [mark.mark for mark in self.marks]

        def add_marker(self, mark):
            self.marks.append(mark)

    return [Item(letter, number) for letter in "ab" for number in "123"]


@pytest.mark.parametrize(
    ("marks", "num_left"), [([], 3), ([pytest.mark.slow], 3), ([pytest.mark.full_product], 6)]
)
def test_the_rest_of_stacked_marks_is_exhaustive_but_where_all_are_wanted(marks, num_left):
    items = letters_and_numbers(marks)
    leave_products_to_exhaustive(items)
    left = [item for item in items if "exhaustive" not in {m.name for m in item.iter_markers()}]
    assert len(left) == num_left
    for axis in range(2):
        values = {item.callspec._idlist[axis] for item in items}
        assert {item.callspec._idlist[axis] for item in left} == values
