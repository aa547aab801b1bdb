"""What a trace may find missing, and a step that runs uncompiled makes."""


class StateMissing(Exception):
    """A step makes optimizer state that was not there; what is there when it runs uncompiled."""
