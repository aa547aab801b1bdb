"""Whether the losses of replicas combine into the loss of the whole batch."""
