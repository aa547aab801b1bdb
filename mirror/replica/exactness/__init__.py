"""Whether what the replicas make of their parts is what one device makes of the batch."""
