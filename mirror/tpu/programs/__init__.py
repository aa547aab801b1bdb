"""Programs of jax: a user's step, traced and compiled for all replicas."""
