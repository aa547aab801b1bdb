"""``mirror run``: an unchanged script under an open scope."""
