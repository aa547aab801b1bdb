"""How workers meet: one that does not come is told, and a process group that is there is used."""

import pytest

from tests.comm.workers.programs import Program, run


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
