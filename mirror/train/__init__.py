"""Around a training loop: what a program does besides its steps."""
