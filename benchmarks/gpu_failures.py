"""Checks of failures on GPUs for gpu_several.py: errors of one replica, and of a device."""

from __future__ import annotations

import subprocess
import sys
import time

import torch
from checking import Skipped
from gpu_trainings import Devices
from torch import Tensor, nn

import mirror

_FAILING = """
import time, torch, mirror

options = mirror.CommunicationOptions(timeout_seconds=100)
strategy = mirror.MirroredStrategy({devices!r}, communication_options=options)
model = strategy.mirror(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def step(i):
    context = mirror.get_replica_context()
    if i == 3 and context.replica_id_in_sync_group == {last}:
        torch._assert_async(torch.zeros((), device=context.device))
    loss = model(torch.ones(2, 4, device=context.device)).sum()
    loss.backward()
    optimizer.step()
    return loss.item()


for i in range(8):
    if i == 3:
        print(time.time(), flush=True)
    strategy.run(step, args=(i,))
"""


def one_replica_fails(devices: Devices) -> str:
    """An error of one replica is raised at once, with the replica's name; training goes on."""
    last, slowest = len(devices) - 1, 0.0
    with mirror.MirroredStrategy(devices) as strategy:
        model = strategy.mirror(nn.Linear(4, 4).to(devices[0]))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(failing: str) -> None:
            context = mirror.get_replica_context()

            def fail(gradient: Tensor | None = None) -> None:
                if context.replica_id_in_sync_group == last:
                    torch.empty(1 << 50, device=context.device, dtype=torch.uint8)

            outputs = model(torch.ones(2, 4, device=context.device))
            if failing == "forward":
                fail()
            elif failing == "backward":
                outputs.register_hook(fail)
            optimizer.zero_grad()
            outputs.sum().backward()
            optimizer.step()

        for failing in ("forward", "backward"):
            begin = time.perf_counter()
            try:
                strategy.run(step, args=(failing,))
            except RuntimeError as error:  # out of memory
                notes = getattr(error, "__notes__", [])  # since Python 3.11
                assert not notes or any(f"replica {last}" in note for note in notes), notes
            else:
                raise AssertionError(f"no error in {failing}")
            slowest = max(slowest, time.perf_counter() - begin)
            strategy.check_replicas()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            strategy.run(step, args=("",))
            strategy.check_replicas()
            after = [parameter.detach() for parameter in model.parameters()]
            assert not torch.equal(before[0], after[0]), "the step after the error does not train"
    assert slowest < 10, f"the error came after {slowest:.1f} s"
    return f"out of memory in forward and backward: within {slowest:.2f} s"


def a_device_that_fails(devices: Devices) -> str:
    """An assertion on the last GPU ends the program, long before collectives time out."""
    if devices[0].type != "cuda":
        raise Skipped("simulated devices do not fail")
    program = _FAILING.format(devices=[str(d) for d in devices], last=len(devices) - 1)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=85
        )
    except subprocess.TimeoutExpired:
        raise AssertionError("the program did not end within 85 s") from None
    assert ended.returncode != 0, "the program ended without an error"
    assert "CUDA error" in ended.stderr, ended.stderr[-600:]
    seconds = time.time() - float(ended.stdout)
    assert seconds < 30, f"the program ended {seconds:.0f} s after the assertion"
    last_line = ended.stderr.strip().splitlines()[-1]
    return f"ended {seconds:.0f} s after the assertion: {last_line[:150]}"
