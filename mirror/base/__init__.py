"""Modules that every layer may import: private names of torch, Dynamo, forks, files, hints."""
