"""The program of test_between_runs.py: Ctrl-C at any point of the main thread.

Prints a line per case: its name, what ``run`` raised, whether the strategy goes on as before, and
whether its threads end with it.
"""

import faulthandler
import os
import signal
import sys
import threading
from time import monotonic

import torch
from torch import nn

import mirror
from mirror.threads import lockstep, schedule
from tests.toy_models import meet
from tests.toy_models import replica_id as me

N = 3
over = threading.Event()  # the run of the case has raised
MAIN = threading.main_thread().ident


def interrupt():
    """Ctrl-C: the main thread gets it, whichever thread this is.

    A signal that comes between Python's last look and the system call that waits is lost to it.
    """
    until = monotonic() + 0.1
    while monotonic() < until:
        torch.ones(1).add_(1)
    signal.pthread_kill(MAIN, signal.SIGINT)


def busy():
    """Computes until it is released."""
    while True:
        torch.ones(1).add_(1)


def meet_in_a_run_inside():
    return mirror.get_replica_context().merge_call(lambda strategy: strategy.run(meet))


def in_the_first_replica():
    if me() == 0:
        interrupt()
        busy()
    meet()


def in_the_last_replica():
    meet()
    if me() == N - 1:
        interrupt()
        busy()
    meet()


def while_the_first_replica_waits_to_meet():
    if me() == 1:
        interrupt()
        busy()
    meet()


def while_the_first_replica_has_returned():
    meet()
    if me() == 0:
        return
    if me() == 2:
        interrupt()
    busy()


def while_all_wait_for_merge_call():
    def merged(strategy):
        interrupt()
        busy()

    mirror.get_replica_context().merge_call(merged)


def in_a_run_inside_merge_call():
    def inner():
        if me() == 1:
            interrupt()
            busy()
        meet()

    mirror.get_replica_context().merge_call(lambda strategy: strategy.run(inner))


def in_a_run_inside_merge_call_that_cannot_be_stopped():
    def inner():
        if me() == 1:
            interrupt()
            over.wait()
        meet()

    mirror.get_replica_context().merge_call(lambda strategy: strategy.run(inner))


def in_a_run_of_another_strategy():
    def inner():
        if me() == 1:
            interrupt()
            busy()
        meet()

    if me() == 1:
        with mirror.MirroredStrategy(["cpu"] * 2, schedule=sys.argv[1]) as another:
            another.run(inner)
    meet()


def in_a_backward_pass():
    class Interrupting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            if me() == 1:
                interrupt()
                busy()
            return grad

    x = model[0](torch.ones(2, 4))
    for layer in model[1:]:
        x = layer(x)
    Interrupting.apply(x).sum().backward()


def twice():
    if me() == 2:
        interrupt()
        try:
            busy()
        finally:
            interrupt()
    meet()


def in_a_backward_pass_outside_run():
    def stop(grad):
        interrupt()
        busy()

    def forward():
        output = model(torch.ones(2, 4)).sum()
        if me() == 1:
            output.register_hook(stop)
        return output

    strategy.reduce("sum", strategy.run(forward)).backward()


CASES = (
    in_the_first_replica,
    in_the_last_replica,
    while_the_first_replica_waits_to_meet,
    while_the_first_replica_has_returned,
    while_all_wait_for_merge_call,
    in_a_run_inside_merge_call,
    in_a_run_inside_merge_call_that_cannot_be_stopped,
    in_a_run_of_another_strategy,
    in_a_backward_pass,
    in_a_backward_pass_outside_run,
    twice,
)


def make():
    packs = mirror.CommunicationOptions(bytes_per_pack=0)
    strategy = mirror.MirroredStrategy(
        ["cpu"] * N, schedule=sys.argv[1], communication_options=packs
    )
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    return strategy, strategy.mirror(layers)


def one_step(strategy, model):
    """Trains a step from the same start; returns what it leaves."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
            parameter.grad = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.run(lambda: (model(torch.ones(2, 4)).sum().backward(), optimizer.step(), meet()))
    strategy.check_replicas()
    return [parameter.detach().clone() for parameter in model.parameters()]


if __name__ == "__main__":
    lockstep.DRAIN_SECONDS = 0.5
    faulthandler.dump_traceback_later(60, exit=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for case in CASES:
        over.clear()
        strategy, model = make()
        expected = one_step(strategy, model)
        raised = "nothing"
        try:
            if case is in_a_backward_pass_outside_run:
                schedule.LONG_TURN_SECONDS, schedule.NUM_TURNS = -1.0, 1  # at once
                case()
            else:
                strategy.run(case)
        except KeyboardInterrupt:
            raised = "KeyboardInterrupt"
        nested = strategy.run(meet_in_a_run_inside)
        assert nested.values == (N,) * N, nested  # while one may still block in such a run
        over.set()
        if case is in_a_run_inside_merge_call_that_cannot_be_stopped:
            for thread in threading.enumerate():
                if "mirror replica" in thread.name:
                    thread.join(0.2)  # one that could not be interrupted ends now
        goes_on = all(map(torch.equal, one_step(strategy, model), expected))
        strategy.close()
        left = [thread for thread in threading.enumerate() if "mirror" in thread.name]
        for thread in left:
            thread.join(5)
        alive = any(thread.is_alive() for thread in left)
        print(case.__name__, raised, goes_on, "leaves threads" if alive else "ends", flush=True)
    os._exit(0)
