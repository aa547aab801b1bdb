"""What a program may be refused for: errors that the documentation announces, by their words."""

from mirror.errors import MirrorError

# What the message says, and where that is documented.
DOCUMENTED = {
    "of optimizers that evaluate the closure several times": "README, Limits: step(closure)",
    "a post-accumulate hook would run before this parameter's gradient is reduced": "the error",
    "a gradient was changed in place under no_sync": "strategy.no_sync",
}


def why_refused(error):
    """The documented reason of an error; None for one that is a fault."""
    if not isinstance(error, MirrorError):
        return None
    return next((why for words, why in DOCUMENTED.items() if words in str(error)), None)
