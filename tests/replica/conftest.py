"""After every test, each replica's tensors of a parameter are one memory."""

from tests.one_memory import one_memory  # noqa: F401
