"""Devices beyond their names: meshes, streams, events, CUDA graphs, host memory."""
