"""Running a compiled step: programs on replicas, beside all else that a strategy does."""
