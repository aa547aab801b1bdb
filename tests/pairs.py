"""Pairwise tests: every two values of two parameters occur together in some case.

::

    @pairwise(backend=BACKENDS, schedule=["lockstep", "staggered"], n=[2, 3, 4])
    def test_it(backend, schedule, n): ...

Most faults need one value, or two together. So only those cases of the full product run in which
every two values of two parameters come together; the rest is left to ``make exhaustive-test``, or
has the marks that come first. A value may be a ``pytest.param`` with marks, for all of its cases.
An axis of two parameters has both names: ``**{"model,change": PAIRS}``.
"""

import itertools

import pytest

EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)


def pairwise(marks=EXHAUSTIVE, /, **axes):
    """Parametrizes a test: cases in which every two values meet; the rest is exhaustive."""
    return _parametrized(axes, covering(list(map(len, axes.values())), 2), marks)


def each_once(marks=EXHAUSTIVE, /, **axes):
    """The same, with as many cases as the longest has values: every value comes once, or more."""
    lengths = list(map(len, axes.values()))
    diagonal = [tuple(i % length for length in lengths) for i in range(max(lengths))]
    return _parametrized(axes, diagonal, marks)


def quick_of(values, quick):
    """Returns params of values: those that are not among ``quick`` are exhaustive."""
    assert all(value in values for value in quick), f"{quick} are not all among {list(values)}"
    return [v if v in quick else pytest.param(v, marks=EXHAUSTIVE) for v in values]


def every(step, values):
    """Returns params of values: the first of each ``step`` is quick, the others are exhaustive."""
    return [
        v if i % step == 0 else pytest.param(v, marks=EXHAUSTIVE) for i, v in enumerate(values)
    ]


def covering(lengths, strength):
    """Returns few cases, as tuples of indices, in which each so many values come together."""
    cases = list(itertools.product(*map(range, lengths)))
    missing = set().union(*(_meetings(case, strength) for case in cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & _meetings(case, strength)))
        missing -= _meetings(best, strength)
        chosen.append(best)
    return chosen


def _meetings(case, strength):
    return set(itertools.combinations(enumerate(case), strength))


def _parametrized(axes, chosen, marks_of_others):
    lists = [[_param(name, i, value) for i, value in enumerate(axes[name])] for name in axes]
    cases = []
    for places in itertools.product(*(range(len(values)) for values in lists)):
        params = [values[i] for values, i in zip(lists, places, strict=True)]
        marks = [mark for param in params for mark in param.marks]
        marks += [] if places in chosen else marks_of_others
        name = "-".join(param.id for param in params)
        of_case = (value for param in params for value in param.values)
        cases.append(pytest.param(*of_case, marks=marks, id=name))
    return pytest.mark.parametrize(",".join(axes), cases)


def _param(axis, i, value):
    if not isinstance(value, type(pytest.param())):
        value = pytest.param(*value) if "," in axis else pytest.param(value)
    told = [getattr(what, "__name__", what) for what in value.values]
    is_short = all(isinstance(one, str | int | float) for one in told)
    name = value.id or ("-".join(map(str, told)) if is_short else f"{axis}{i}")
    return pytest.param(*value.values, marks=value.marks, id=name)
