"""Measures parameter servers: calls, pulls and pushes of an engine, and steps of the strategy.

::

    mirror bench servers --engine process
    mirror bench servers --engine ray --steps 100

The first table is of the engine alone: a call with 64 bytes, there and back, and 10 MB pulled and
pushed, beside a memory copy of the same size and plain sockets. Copies are counted, not timed: the
bytes that the kernel receives and sends, and those that numpy copies.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.server.engine.engine_types import Actor
from mirror.server.engine.process_engine import make_engine

ROLE = "servers:Values"  # sys.path of a program begins with its folder
NUM_BYTES = 10_000_000


class Values:
    """A server that keeps an array."""

    def __init__(self) -> None:
        self.values = np.zeros(NUM_BYTES, np.uint8)

    def pull(self, header, buffers):
        return {}, [self.values]

    def push(self, header, buffers):
        self.last = buffers[0]

    def echo(self, header, buffers):
        return header, buffers


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        prog="mirror bench servers",
        description="Parameter servers: calls, pulls and pushes of an engine, and steps over it.",
    )
    parser.add_argument("--engine", default="process", choices=["process", "ray"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, engine {args.engine}")
    begun = time.perf_counter()
    with make_engine(args.engine) as engine:
        actors = [engine.start("first", ROLE, {})]
        first = time.perf_counter() - begun
        begun = time.perf_counter()
        actors += [engine.start(f"server {i}", ROLE, {}) for i in range(4)]
        four = time.perf_counter() - begun
        print(f"engine and first actor are ready after {first:.2f} s, 4 more after {four:.2f} s")
        _print(_rows(actors[0], args.rounds))
    _train(args.engine, args.steps)


def _rows(actor: Actor, rounds: int) -> list[tuple[str, float, float]]:
    small, into = np.zeros(64, np.uint8), np.zeros(NUM_BYTES, np.uint8)
    source = np.ones(NUM_BYTES, np.uint8)
    plain = _plain_echo()
    todo: dict[str, tuple[int, Callable[[], object]]] = {
        "64 B there and back, us": (200, lambda: actor.call("echo", {}, [small]).result()),
        "the same over a plain socket, us": (200, plain),
        "10 MB pulled, ms": (1, lambda: actor.call("pull", into=[into]).result()),
        "10 MB pushed, ms": (1, lambda: actor.call("push", {}, [source]).result()),
        "10 MB copied in memory, ms": (1, lambda: np.copyto(into, source)),
    }
    times: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(rounds + 2):  # interleaved: all see the same load
        for name, (repeats, call) in todo.items():
            begun = time.perf_counter()
            for _ in range(repeats):
                call()
            unit = 1e6 if name.endswith("us") else 1e3
            times[name].append((time.perf_counter() - begun) / repeats * unit)
    return [(name, min(found[2:]), statistics.median(found[2:])) for name, found in times.items()]


def _train(engine: str, num_steps: int) -> None:
    """Asynchronous steps of a small MLP over two servers and two workers."""
    with mirror.ParameterServerStrategy(num_servers=2, num_workers=2, engine=engine) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x, y = torch.randn(64, 64), torch.randint(10, (64,))

        def step():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        coordinator = mirror.ClusterCoordinator(strategy)
        for _ in range(20):
            coordinator.schedule(step)
        coordinator.join()
        begun = time.perf_counter()
        for _ in range(num_steps):
            coordinator.schedule(step)
        coordinator.join()
        print(
            f"{num_steps / (time.perf_counter() - begun):.0f} steps a second; with the first 20:"
        )
        print(strategy.report())


def _plain_echo() -> Callable[[], object]:
    listener = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        with socket.create_connection(listener.getsockname()) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := sock.recv(4096):
                sock.sendall(data)
        os._exit(0)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = bytes(64)

    def trip() -> bytes:
        sock.sendall(data)
        return sock.recv(4096)

    return trip


def _print(rows: list[tuple[str, float, float]]) -> None:
    print(f"{'':36}{'best':>10}{'median':>10}")
    for name, best, median in rows:
        print(f"{name:36}{best:10.1f}{median:10.1f}")


if __name__ == "__main__":
    main()
