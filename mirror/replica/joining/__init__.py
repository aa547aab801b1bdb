"""Arguments and outputs of a split call: the replicas' parts, and these joined again."""
