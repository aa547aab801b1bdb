"""What users of TPUs hold: the strategy and its scope."""
