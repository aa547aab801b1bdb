"""mirror/cluster/slurm.py: every form of list, from a generator that knows the hosts."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.cluster import ClusterError
from mirror.cluster.slurm import MAX_HOSTS, expand_hostlist, expand_tasks_per_node

NAMES = st.text("abz-._", min_size=1, max_size=4)


def ask(expand, text):
    try:
        return expand(text)
    except ClusterError as error:
        return str(error)


@st.composite
def ranges(draw):
    """A range as it is written, and the numbers in it."""
    width = draw(st.integers(1, 4))
    first = draw(st.integers(0, 10**width - 1))
    last = first + draw(st.integers(0, 15))
    if first == last and draw(st.booleans()):
        return f"{first:0{width}}", [f"{first:0{width}}"]
    return f"{first:0{width}}-{last:0{width}}", [
        f"{number:0{width}}" for number in range(first, last + 1)
    ]


@st.composite
def hosts(draw):
    """Hosts as they are written together, and each of them."""
    written, choices = "", []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            parts = draw(st.lists(ranges(), min_size=1, max_size=3))
            written += f"[{','.join(text for text, _ in parts)}]"
            choices.append([number for _, numbers in parts for number in numbers])
        else:
            name = draw(NAMES)
            written += name
            choices.append([name])
    return written, ["".join(parts) for parts in product(*choices)]


@given(st.lists(hosts().filter(lambda pair: len(pair[1]) < 2000), max_size=4))
@settings(max_examples=150, deadline=None)
def test_a_list_is_expanded_into_what_was_written(parts):
    text = ",".join(written for written, _ in parts)
    assert expand_hostlist(text) == [host for _, expanded in parts for host in expanded]


@given(st.text("n1a[],- 0x()\n", max_size=12))
@settings(max_examples=300, deadline=None)
def test_whatever_comes_is_expanded_or_an_error_that_shows_it(text):
    for expand in (expand_hostlist, expand_tasks_per_node):
        said = ask(expand, text)
        assert isinstance(said, list) or repr(text) in said


@pytest.mark.parametrize(
    "text",
    [
        *"n[1 n1] n[] n[a-c] n[[1]] n[1-2-3] n[,] ,n1 n1,,n2 n1, n[3-1] n[-3] n[3-]".split(),
        *["n1, n2", "n1\n", " ", "n*", "n[1-2]\u0661", "n[\u0661]", f"n[0-{MAX_HOSTS}]"],
        *["n[0-9999][0-9999][0-9999]", "n[0-99999999999999999]", "n[0-" + "9" * 6000 + "]"],
        ",".join(["n[0-40000]"] * 2),
    ],
)
def test_what_is_no_list_of_hosts_is_an_error(text):
    with pytest.raises(ClusterError, match="a list of hosts is written like") as error:
        expand_hostlist(text)
    assert len(str(error.value)) < 300


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 30)), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_counts_are_expanded_into_what_was_written(parts):
    text = ",".join(f"{n}(x{times})" if times > 1 else str(n) for n, times in parts)
    assert expand_tasks_per_node(text) == [n for n, times in parts for _ in range(times)]


@pytest.mark.parametrize(
    "text",
    ["", "x", "2(x)", "2(x2", "2,", "-1", "0", "2(x0)", "2 ", "2(x70000)", "1(x40000),1(x40000)"],
)
def test_what_are_no_counts_is_an_error(text):
    with pytest.raises(ClusterError, match=r"are written like '2\(x3\),1'"):
        expand_tasks_per_node(text)
