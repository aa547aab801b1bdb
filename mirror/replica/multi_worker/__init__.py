"""State that workers keep equal: gradients, first values, buffers."""
