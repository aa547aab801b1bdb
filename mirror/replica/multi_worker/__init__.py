"""What workers keep equal: gradients, first values, buffers; and the checks of it."""
