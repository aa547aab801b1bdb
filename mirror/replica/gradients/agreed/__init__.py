"""Gradients of several workers: agreed buckets, whose tails say what each worker has brought."""
