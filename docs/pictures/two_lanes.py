"""Draws two_lanes.svg, a step on two replicas: from two_lanes.json, or, with --take, a new one.

python docs/pictures/two_lanes.py --take
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import nn

import mirror

HERE = Path(__file__).parent
NUM_STEPS = 40  # the shortest is the one that other work has disturbed least


def take(path: Path) -> None:
    """Writes the trace of a step in run, and leaves out what no picture shows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy = mirror.MirroredStrategy(["cpu", "cpu"])
    with strategy.scope():
        layers = nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.ReLU()
        model = nn.Sequential(*layers, nn.Linear(512, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, y = batch
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    data = [(torch.randn(256, 512), torch.randint(10, (256,)))] * (NUM_STEPS + 20)
    batches = iter(strategy.distribute_dataset(data))
    for _ in range(20):
        strategy.run(step, args=(next(batches),))
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / "trial.json"
        shortest = float("inf")
        for _ in range(NUM_STEPS):
            with strategy.trace(trial) as trace:
                strategy.run(step, args=(next(batches),))
            if trace.seconds < shortest:
                shortest, content = trace.seconds, json.loads(trial.read_text())
    strategy.close()
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    origin = min(event["ts"] for event in spans)
    for event in spans:
        event["ts"], event["dur"] = round(event["ts"] - origin, 1), round(event["dur"], 1)
    path.write_text(json.dumps(content, indent=0) + "\n")


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--take", action="store_true", help="a trace of this machine")
    if parser.parse_args().take:
        take(HERE / "two_lanes.json")
    mirror.Trace.load(HERE / "two_lanes.json").to_svg(HERE / "two_lanes.svg")


if __name__ == "__main__":
    main()
