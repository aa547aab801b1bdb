"""Local gradients become reduced ones."""
