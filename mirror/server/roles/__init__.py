"""What runs where: servers, workers, and the coordinator's side of both."""
