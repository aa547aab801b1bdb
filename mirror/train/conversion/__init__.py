"""Plain training scripts, put under a strategy by two lines: docs/init.md."""
