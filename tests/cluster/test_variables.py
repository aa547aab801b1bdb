"""mirror/cluster/variables.py: variables, and what is said of those that are wrong."""

import pytest

from mirror.cluster import ClusterError
from mirror.cluster.variables import MAX_PROCESSES, EnvironmentVariables, integer


def test_the_first_that_is_set_counts_and_empty_is_not_set():
    told = EnvironmentVariables({"A": "", "B": " ", "C": " 7 ", "D": "8"})
    assert told.text("X", "A", "B", "C", "D") == "7"
    assert told.first("X", "A", "B", "C", "D") == "C"
    assert told.integer("A", "D") == told.needed_integer("D", why="") == 8
    assert told.text("X", "A", "B") is told.first("X") is told.integer("A", "B") is None


def test_they_are_those_of_now(monkeypatch):
    told = EnvironmentVariables()
    for text in ("one", "two"):
        monkeypatch.setenv("MIRROR_TEST_VARIABLE", text)
        assert told.needed("MIRROR_TEST_VARIABLE", why="") == text


def test_what_is_missing_is_named_with_what_to_do():
    told = EnvironmentVariables({"A": ""})
    for needed in (told.needed, told.needed_integer):
        with pytest.raises(ClusterError, match=r"^A or B is not set; use a launcher$"):
            needed("A", "B", why="use a launcher")


@pytest.mark.parametrize(
    "text",
    ["x", "-1", "+1", "1.0", "1e3", "0x1", "1_0", "\u0661", str(MAX_PROCESSES + 1), "9" * 9999],
)
def test_what_is_no_number_in_range_is_named_and_shown(text):
    with pytest.raises(ClusterError, match=f"^A is a number from 0 to {MAX_PROCESSES}; got '"):
        EnvironmentVariables({"A": text}).integer("A")
    with pytest.raises(ClusterError, match=r"^the port is a number from 1 to 3; got '0'$"):
        integer("0", "the port", least=1, most=3)
