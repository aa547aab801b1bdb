"""The closure queue: which worker gets which step, and what becomes of failed steps."""

import threading

import pytest

from mirror.errors import ActorDied, ServerLostError, StrategyError, WorkerLostError
from mirror.server.roles.closure_queue import Closure, ClosureQueue


class Workers:
    """Workers as a function: ``act(worker, step)`` returns a header and a value."""

    def __init__(self, num_workers, act, to_aggregate=None, queue_size=1000):
        self.restarted = []
        self.lock = threading.Lock()
        self.queue = ClosureQueue(
            num_workers,
            lambda worker, step, done_below: act(worker, step),
            self.restarted.append,
            to_aggregate=to_aggregate,
            queue_size=queue_size,
        )

    def put(self, data=b""):
        return self.queue.put(lambda number: Closure(number, data, [], ()))


@pytest.fixture
def workers():
    made = []

    def make(*args, **options):
        made.append(Workers(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.queue.close()


def make_outcome(value=None, **more):
    return {"outcome": "returned", **more}, value


def test_all_steps_run_once_and_have_their_values(workers):
    one = workers(3, lambda worker, step: make_outcome(step.number * 2))
    steps = [one.put() for _ in range(50)]
    one.queue.wait()
    assert [step.value for step in steps] == [2 * k for k in range(50)]
    assert not one.queue.is_busy()


def test_a_full_queue_blocks_until_a_step_is_taken(workers):
    go = threading.Semaphore(0)

    def act(worker, step):
        go.acquire()
        return make_outcome()

    one = workers(1, act, queue_size=2)
    first = one.put()
    done = threading.Event()

    def put():
        for _ in range(3):
            one.put()
        done.set()

    thread = threading.Thread(target=put)
    thread.start()
    assert not done.wait(0.1)
    go.release()
    assert first.ended.wait(60)
    assert done.wait(60)
    for _ in range(3):
        go.release()
    one.queue.wait()
    thread.join()


def test_an_error_is_raised_once_and_what_waits_is_not_run(workers):
    go = threading.Event()

    def act(worker, step):
        go.wait(10)
        return ({"outcome": "raised"}, KeyError("it")) if step.data else make_outcome()

    one = workers(1, act)
    failing, waiting = one.put(b"x"), one.put()
    go.set()
    with pytest.raises(KeyError, match="it"):
        one.queue.wait()
    assert isinstance(failing.error, KeyError)
    assert isinstance(waiting.error, StrategyError)
    assert "step 0 has raised KeyError" in str(waiting.error)
    one.queue.wait()
    later = one.put()
    one.queue.wait()
    assert later.error is None


def test_put_raises_what_a_step_has_raised(workers):
    one = workers(1, lambda worker, step: ({"outcome": "raised"}, KeyError("it")))
    one.put().ended.wait(10)
    with pytest.raises(KeyError):
        one.put()
    one.put()
    with pytest.raises(KeyError):
        one.queue.wait()


def test_errors_of_steps_beside_one_that_was_raised_are_told_by_fetch_alone(workers):
    go = threading.Event()

    def act(worker, step):
        if step.data == b"late":
            go.wait(10)
        return ({"outcome": "raised"}, KeyError(step.number)) if step.data else make_outcome()

    one = workers(2, act)
    late, early = one.put(b"late"), one.put(b"early")
    assert early.ended.wait(60)
    with pytest.raises(KeyError, match="1"):
        one.put()
    later = one.put()
    go.set()
    one.queue.wait()
    assert isinstance(late.error, KeyError)
    assert later.error is None


def test_a_lost_workers_step_goes_on_elsewhere_or_again(workers):
    lost = set()

    def act(worker, step):
        with one.lock:
            if step.number % 5 == 0 and step.number not in lost:
                lost.add(step.number)
                raise ActorDied(f"worker {worker}")
        return make_outcome((step.number, step.attempt))

    one = workers(2, act)
    steps = [one.put() for _ in range(20)]
    one.queue.wait()
    assert [step.value for step in steps] == [(k, int(k % 5 == 0)) for k in range(20)]
    assert len(one.restarted) == one.queue.num_retried == 4


def test_a_step_that_ends_every_worker_is_an_error(workers):
    def act(worker, step):
        if step.data:
            raise ActorDied(f"worker {worker}")
        return make_outcome()

    one = workers(2, act)
    one.put(b"x")
    with pytest.raises(WorkerLostError, match="step 0 has ended 10 workers"):
        one.queue.wait()
    one.put()
    one.queue.wait()


def test_a_lost_server_is_told_by_all_and_forever(workers):
    go = threading.Event()

    def act(worker, step):
        go.wait(10)
        return make_outcome()

    one = workers(1, act)
    running, waiting = one.put(), one.put()
    one.queue.fail(ServerLostError("server 1"))
    for _ in range(2):
        for call in one.put, one.queue.wait, one.queue.check:
            with pytest.raises(ServerLostError, match="server 1"):
                call()
    go.set()
    for step in running, waiting:
        assert step.ended.wait(60)
        assert isinstance(step.error, ServerLostError)


def test_each_worker_gives_one_gradient_for_an_update(workers):
    """As if the leader gathered three: none is dropped, and each comes from another worker."""
    gathered, updates, by = [], [0], []

    def act(worker, step):
        with one.lock:
            by.append(worker)
            gathered.append(worker)
            if len(gathered) < 3:
                return make_outcome(results=["gathered"], updates=list(updates))
            gathered.clear()
            updates[0] += 1
            return make_outcome(results=["applied"], updates=list(updates))

    one = workers(3, act, to_aggregate=3)
    for _ in range(60):
        one.put()
    one.queue.wait()
    assert all(len(set(by[k : k + 3])) == 3 for k in range(0, 60, 3))


def test_who_has_pushed_goes_on_when_nobody_else_can(workers):
    one = workers(
        2, lambda worker, step: make_outcome(results=["gathered"], updates=[0]), to_aggregate=2
    )
    for _ in range(5):
        one.put()
        one.queue.wait()
