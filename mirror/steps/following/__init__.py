"""Following a step: a trace of what it does, below autograd, once for all replicas."""
