"""How a checkpoint is written: nested states, files, and the order of system calls."""
