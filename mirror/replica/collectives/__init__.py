"""all_reduce and all_gather between replicas, and their gradients."""
