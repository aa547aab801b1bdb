"""Faults of mirror that are known and not mended: programs that show them are left out of tests.

Each is words of a program's source and, where that is not enough, of its strategy. This table
only ever shrinks: a mended fault leaves it in the commit that mends it.
"""

import re

KNOWN: dict[str, str] = {}


def known_fault(program):
    """The first known fault whose words are in the program's source; None without."""
    found = (why for words, why in KNOWN.items() if re.search(words, program.source, re.DOTALL))
    return next(found, None)
