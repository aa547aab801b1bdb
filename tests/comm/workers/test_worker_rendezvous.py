"""How workers meet, and that a restarted worker finds nothing of an earlier run."""

import socket
import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mirror.comm.workers.distributed_group import store_for_run
from tests.comm.workers.programs import Program, run


def meet(store, size):
    found = {}

    def come(rank):
        fresh = store_for_run(store, rank, size, 20.0)
        fresh.set(f"own/{rank}", b"%d" % rank)
        found[rank] = fresh

    threads = [threading.Thread(target=come, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_of_an_attempt_meet_and_find_nothing_of_own_connection():
    store = HashStore()
    first = meet(store, 3)
    assert [first[0].get(f"own/{rank}") for rank in range(3)] == [b"0", b"1", b"2"]
    second = meet(store, 3)
    second[0].set("mine", b"1")
    assert second[2].get("mine") == b"1"
    assert not first[1].check(["mine"])


def test_an_answer_to_one_who_is_gone_is_not_taken():
    store = HashStore()
    meet(store, 2)
    with pytest.raises(RuntimeError):
        store_for_run(store, 1, 2, 0.2)  # worker 0 has not come again


def test_worker_0_does_not_wait_for_ever():
    store = HashStore()
    meet(store, 2)
    with pytest.raises(RuntimeError, match="worker 1 is missing"):
        store_for_run(store, 0, 2, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 1])
def test_who_does_not_come_is_told(absent):
    with Program("ready()\nmade(2.0)", absent=(absent,)) as program:
        program.ready()
        (ended,) = program.ended(within=60)
    assert ended.code == 1, ended
    assert "WorkerLostError: not all workers have come to the start within 2 s" in ended.err


USERS = """
dist.init_process_group("gloo")
workers = made()
ready()
workers.exchange("first")
dist.all_reduce(tensor := torch.ones(2))
workers.close()
dist.destroy_process_group()
os.environ["MASTER_PORT"] = os.environ["OTHER_PORT"]
dist.init_process_group("gloo")
workers = made()
print(tensor.tolist(), len(workers.exchange("first")))
"""


@pytest.mark.slow
def test_the_programs_own_process_group_is_used_and_left_to_it():
    for ended in run(USERS):
        assert (ended.code, ended.err) == (0, ""), ended
        assert ended.out == "[2.0, 2.0] 2\n"


ALONE = """
import os
import mirror

os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "%s"}
mirror.MultiWorkerMirroredStrategy(["cpu"])
"""


def test_a_port_of_another_connection_is_an_error_that_names_it(script_pool):
    """From another address, a connection may have a port that is free at 127.0.0.1."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        source = "127.0.0.3", 0
        with socket.create_connection(server.getsockname(), source_address=source) as connection:
            number = connection.getsockname()[1]
            done = script_pool.run(ALONE % number)
    assert done.returncode == 1
    assert f"ClusterError: worker 0 cannot listen at MASTER_PORT={number}, which" in done.stderr
