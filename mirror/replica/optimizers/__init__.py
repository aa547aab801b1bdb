"""Any torch.optim optimizer over mirrored parameters."""
