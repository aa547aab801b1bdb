"""What a program may go wrong by: known faults of mirror, and errors that are documented."""

import re

from mirror.errors import MirrorError

# Faults that are not mended: words of a program's source, and why. Programs that show them are
# left out of tests; a fault leaves this table in the commit that mends it.
KNOWN: dict[str, str] = {}

# Errors: what the message says, and where that is documented.
DOCUMENTED = {
    "of optimizers that evaluate the closure several times": "README, Limits: step(closure)",
    "a post-accumulate hook would run before this parameter's gradient is reduced": "the error",
    "a post-accumulate hook of 'head.weight' is Python": "docs/compiled-steps.md",
    "a gradient was changed in place under no_sync": "strategy.no_sync",
}


def known_fault(program):
    """The first known fault with its words in the program's source; None without."""
    found = (why for words, why in KNOWN.items() if re.search(words, program.source, re.DOTALL))
    return next(found, None)


def why_refused(error):
    """The documented reason of an error; None for one that is a fault."""
    if not isinstance(error, MirrorError):
        return None
    return next((why for words, why in DOCUMENTED.items() if words in str(error)), None)
