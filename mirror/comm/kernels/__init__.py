"""Our own CUDA kernels, and what runs them: on GPUs, or simulated on the CPU."""
