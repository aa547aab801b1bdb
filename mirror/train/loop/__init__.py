"""A training loop that stays the user's: its steps are counted, and hooks do the rest."""
