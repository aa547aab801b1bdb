"""What every layer may import: private names of torch, Dynamo's hold, forks, files, hints, timelines."""
