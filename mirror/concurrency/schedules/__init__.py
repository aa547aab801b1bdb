"""In which manner replicas move, and which manner is the fastest."""
