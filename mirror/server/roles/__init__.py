"""The roles of processes: servers, workers, and the coordinator's side of both."""
