"""What GPUs and the CPU do differently, beside their names: streams, events, clocks, memory."""
