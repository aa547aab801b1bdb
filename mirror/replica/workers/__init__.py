"""What is equal on all workers: the values that they begin with, buffers; and whether it is."""
