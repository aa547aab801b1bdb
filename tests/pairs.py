"""Pairwise tests: every two values of two parameters occur together in some case.

::

    @pairwise(backend=BACKENDS, schedule=["lockstep", "staggered"], n=[2, 3, 4])
    def test_it(backend, schedule, n): ...

Most faults need one value, or two together. So only those cases of the full product run in which
every two values of two parameters come together; the rest is left to ``make exhaustive-test``, or
has the marks that come first. A value may be a ``pytest.param`` with marks, for all of its cases.
An axis of two parameters has both names: ``**{"model,change": PAIRS}``.

Of a test with several parametrized marks or fixtures, whose cases are a product, the cases run in
which every value comes up: ``leave_products_to_exhaustive``, which conftest.py calls. A test for
which the product matters, such as that of backends and dtypes, has the mark ``full_product``.
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


def leave_products_to_exhaustive(items):
    """Marks cases of products as exhaustive, but those in which every value comes up.

    The axes of a product are the parametrized marks and fixtures of a test. The quick cases of a
    test, and its slow ones, are chosen each by themselves. A case that would skip itself may be
    the only one of its value: parametrize such a test by a list of the cases that can be.
    """
    products = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if getattr(item, "callspec", None) and not marks & {"exhaustive", "full_product"}:
            test = item.nodeid.partition("[")[0]
            case = tuple(enumerate(item.callspec._idlist))
            products.setdefault((test, "slow" in marks), {}).setdefault(case, item)
    for cases in products.values():
        num_axes = sum(len(set(values)) > 1 for values in zip(*cases, strict=True))
        for case in cases.keys() - spread(list(cases)) if num_axes > 1 else ():
            for mark in EXHAUSTIVE:
                cases[case].add_marker(mark)


def spread(cases):
    """Returns few of the cases, tuples of values, with every value, each about equally often.

    A value is a pair of axis and name.
    """
    times = dict.fromkeys((value for case in cases for value in case), 0)
    chosen = set()
    while 0 in times.values():
        best = min(cases, key=lambda case: _novelty(case, times))
        chosen.add(best)
        for value in best:
            times[value] += 1
    return chosen


def _novelty(case, times):
    """Sorts first the case with the most values that are new, then that with the rarest."""
    return -sum(not times[value] for value in case), sum(times[value] for value in case)


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
