"""Training stays that of one device when parameters and buffers get other memory; or is told.

``memory_programs.py`` has the programs. Own steps are what replicas on distinct GPUs make.
"""

import functools
import itertools
import logging
from pathlib import Path

import pytest

import mirror
from tests.oracle import assert_same
from tests.pairs import EXHAUSTIVE
from tests.replica.params.memory_programs import PROGRAMS, Documented, Raises, Warns, train

DOCS = Path(__file__).parents[3] / "docs" / "limits.md"
AXES = list(itertools.product((1, 3), (False, True), ("replicated", "sharded")))


@functools.cache
def on_one_device(place):
    return train(PROGRAMS[place])


def cases():
    """All programs in all ways: one way of each is quick, and neighbours have different ones."""
    for place, program in enumerate(PROGRAMS):
        for i, (way, own_steps, state) in enumerate(AXES):
            steps = "own steps" if own_steps else "one step"
            yield pytest.param(
                *(place, way, own_steps, state),
                id=f"{program.name}-way {way}-{steps}-{state}",
                marks=() if (place * 3) % len(AXES) == i else EXHAUSTIVE,
            )


def test_programs_have_names_of_their_own():
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("place", "way", "own_steps", "state"), [*cases()])
def test_other_memory(place, way, own_steps, state, make_strategy, caplog):
    program, expected = PROGRAMS[place], PROGRAMS[place].expected
    strategy = make_strategy(2, optimizer_state=state, own_steps=own_steps)
    if isinstance(expected, Raises) and way in expected.ways:
        with pytest.raises(getattr(mirror, expected.kind, RuntimeError), match=expected.match):
            train(program, strategy, way)
        return
    one_device = on_one_device(place)
    with caplog.at_level(logging.WARNING, "mirror"):
        found = train(program, strategy, way)
    if isinstance(expected, Documented):
        assert expected.words in DOCS.read_text()
    elif isinstance(expected, Warns) and way in expected.ways:
        assert expected.match in caplog.text
    else:
        assert_same(found, one_device)
        strategy.check_replicas()
