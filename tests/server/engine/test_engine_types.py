"""The suite of the protocol: what holds of actors of every engine."""

import os
import signal
import threading

import numpy as np
import pytest

from mirror.errors import MirrorError
from mirror.server.engine.engine_types import ActorDied, RemoteError, WireError
from mirror.server.engine.process_engine import connect_actor
from tests.server.engine.conftest import ECHO
from tests.server.engine.roles import TwoArgumentsError

DTYPES = "? b B h H i I q Q e f d F D".split()
SHAPES = [(), (0,), (1,), (3, 0, 2), (2, 3), (1,) * 9]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_go_there_and_back_as_they_are(actor, shape):
    sent = [(np.arange(np.prod(shape)) % 2).reshape(shape).astype(dtype) for dtype in DTYPES]
    header, got = actor.call("echo", {"a": [1, None, "\u00e9"], "b": {}}, sent).result(60)
    assert header == {"a": [1, None, "\u00e9"], "b": {}}
    assert [(a.dtype, a.shape) for a in got] == [(a.dtype, a.shape) for a in sent]
    assert all(np.array_equal(a, b) for a, b in zip(got, sent, strict=True))


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 3_000_000])
def test_large_and_small_buffers_come_whole(actor, size):
    sent = [np.arange(n, dtype=np.uint32) for n in (size, 3, size)]
    _, got = actor.call("echo", {}, sent).result(60)
    assert all(np.array_equal(a, b) for a, b in zip(got, sent, strict=True))


def test_bytes_and_views_arrive_as_arrays_of_bytes(actor):
    strided = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    _, got = actor.call("echo", {}, [b"ab", bytearray(b"c"), memoryview(b"de"), strided]).result()
    assert [array.tolist() for array in got[:3]] == [[97, 98], [99], [100, 101]]
    assert np.array_equal(got[3], strided)


def test_many_buffers_go_in_one_call(actor):
    _, got = actor.call("echo", {}, [np.full(i % 5, i) for i in range(1500)]).result(60)
    assert [array.sum() for array in got] == [i * (i % 5) for i in range(1500)]


def test_what_a_method_gets_is_its_own(actor):
    values = np.ones(4, np.float32)
    actor.call("keep", {}, [values]).result()
    actor.call("add", {"by": 2}).result()
    assert actor.call("fetch").result()[1][0].tolist() == [3] * 4
    assert values.tolist() == [1] * 4


def test_an_answer_is_received_where_it_is_to_be(actor):
    into = [np.zeros((2, 3), np.float32), np.zeros(100_000)]
    actor.call("keep_all", {}, [array + 1 for array in into]).result()
    _, got = actor.call("fetch_all", into=into).result()
    assert all(a is b or np.shares_memory(a, b) for a, b in zip(got, into, strict=True))
    assert all((array == 1).all() for array in into)


@pytest.mark.parametrize(
    "into", [[], [np.zeros(4, np.float32)], [np.zeros(3)], [np.zeros(3, np.float32)] * 2]
)
def test_what_does_not_fit_there_comes_in_arrays_of_its_own(actor, into):
    actor.call("keep", {}, [np.ones(3, np.float32)]).result()
    _, (got,) = actor.call("fetch", into=into).result()
    assert got.tolist() == [1, 1, 1]
    assert all((array == 0).all() for array in into)


def test_none_is_an_empty_answer(actor):
    assert actor.call("nothing").result() == ({}, [])


def test_calls_of_a_thread_run_in_their_order(actor):
    futures = [actor.call("record", {"n": n}) for n in range(100)]
    assert [future.result()[0]["n"] for future in futures[::-1]] == list(range(100))[::-1]
    assert actor.call("report").result()[0]["seen"] == list(range(100))


def test_methods_run_one_at_a_time_for_all_clients(actor):
    clients = [actor, connect_actor(actor.address), connect_actor(actor.address)]

    def many(client, n):
        for _ in range(n):
            client.call("tear", {}, [np.ones(50)]).result(60)

    _together([lambda c=client: many(c, 30) for client in clients * 2])
    assert actor.call("report").result()[0]["torn"] == 0
    for client in clients[1:]:
        client.close()


def test_several_threads_get_each_its_own_answers(actor):
    wrong = []

    def many(k):
        for n in range(50):
            sent = np.full(k * 4000 + n, k * 100 + n)
            header, (got,) = actor.call("echo", {"k": k, "n": n}, [sent]).result(60)
            if header != {"k": k, "n": n} or not np.array_equal(got, sent):
                wrong.append((k, n))

    _together([lambda k=k: many(k) for k in range(4)])
    assert wrong == []


def test_methods_of_a_concurrent_class_meet(engine):
    actor = engine.start("meeting", "tests.server.engine.roles:Meeting", {"parties": 3})
    other = connect_actor(actor.address)
    futures = [client.call("meet", {}, [np.ones(9)]) for client in (actor, actor, other)]
    assert [future.result(60)[0]["met"] for future in futures] == [True] * 3
    other.close()
    actor.kill()


def test_a_result_may_be_asked_for_again(actor):
    future = actor.call("wait", {"seconds": 0.2})
    assert not future.done()
    with pytest.raises(TimeoutError, match="lasting"):
        future.result(timeout=0.01)
    assert future.result(60) == future.result() == ({}, [])
    assert future.done()


def test_an_exception_comes_back_with_its_traceback(actor):
    with pytest.raises(RemoteError, match="no such variable") as raised:
        actor.call("raises", {"kind": "key"}).result()
    error = raised.value
    assert (error.type_name, error.message) == ("KeyError", "'no such variable'")
    assert "roles.py" in error.traceback
    assert "in raises" in str(error)
    assert isinstance(error.original, KeyError)
    assert error.__cause__ is error.original
    assert isinstance(error, MirrorError)


@pytest.mark.parametrize("kind", ["TwoArgumentsError", "LockedError", "SystemExit"])
def test_exceptions_that_are_hard_to_send_come_in_words(actor, kind):
    with pytest.raises(RemoteError, match="3 and 4") as raised:
        actor.call("raises", {"kind": kind}).result()
    assert raised.value.type_name == kind
    assert (raised.value.original is None) == (kind != "SystemExit")
    assert actor.call("nothing").result() == ({}, [])
    with pytest.raises(TypeError):
        TwoArgumentsError("3 and 4")  # as pickle would make it


@pytest.mark.parametrize("method", ["missing", "_private", "__init__", "init"])
def test_what_is_no_method_is_a_remote_error(actor, method):
    with pytest.raises(RemoteError, match=f"Echo has no method '{method}'"):
        actor.call(method).result()


@pytest.mark.parametrize("what", ["a number", "an object", "a set", "objects"])
def test_what_cannot_be_an_answer_is_a_remote_error(actor, what):
    with pytest.raises(RemoteError, match=r"returns|JSON|buffer"):
        actor.call("returns", {"what": what}).result()
    assert actor.call("nothing").result() == ({}, [])


@pytest.mark.parametrize(
    ("header", "buffers", "words"),
    [
        ({"a": object()}, [], "a header is JSON"),
        ({"a": {1}}, [], "a header is JSON"),
        ({}, [np.array([None])], "plain numbers"),
        ({}, [np.array(["a"])], "plain numbers"),
        ({}, [3], "numpy array or bytes"),
        ({}, ["text"], "numpy array or bytes"),
    ],
)
def test_what_cannot_be_sent_is_said_at_once(actor, header, buffers, words):
    with pytest.raises(WireError, match=words):
        actor.call("echo", header, buffers)
    assert actor.call("nothing").result() == ({}, [])


@pytest.mark.parametrize(
    ("role", "init", "words"),
    [
        ("tests.server.engine.roles", {}, "package.module:Class"),
        ("tests.server.engine.missing:Echo", {}, "No module named"),
        ("tests.server.engine.roles:Missing", {}, "Missing"),
        (ECHO, {"fails": True}, "it does not stand"),
    ],
)
def test_a_role_that_cannot_be_made_is_a_remote_error(engine, role, init, words):
    with pytest.raises(RemoteError, match=words):
        engine.start("new", role, init)


def test_a_role_that_ends_its_process_is_a_dead_actor(engine):
    with pytest.raises(ActorDied, match="new"):
        engine.start("new", ECHO, {"exits": True})


def test_death_in_a_call_is_told_to_all_who_wait(actor):
    other = connect_actor(actor.address)
    other.call("nothing").result()
    futures = [actor.call("ends"), actor.call("nothing"), other.call("nothing")]
    for future in futures:
        with pytest.raises(ActorDied, match="lasting"):
            future.result(60)
    assert not actor.alive
    with pytest.raises(ActorDied):
        actor.call("nothing").result(60)
    other.close()


def test_a_killed_actor_is_told_at_once_and_comes_back(actor):
    pid = actor.call("report").result()[0]["pid"]
    deaths = threading.Semaphore(0)
    actor.on_death(deaths.release)
    future = actor.call("wait", {"seconds": 600})
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied):
        future.result(60)
    assert deaths.acquire(timeout=60)
    assert not actor.alive
    before = actor.address
    actor.restart()
    assert actor.alive
    assert actor.address == before
    report = actor.call("report").result()[0]
    assert report["init"] == {"number": 3}
    assert report["pid"] != pid
    actor.kill()
    assert not actor.alive
    assert deaths.acquire(timeout=60)


def test_an_actor_may_be_restarted_where_its_death_is_told(engine):
    actor = engine.start("phoenix", ECHO, {})
    risen = threading.Event()

    def rise():
        actor.restart()
        risen.set()

    actor.on_death(rise)
    actor.call("ends")
    assert risen.wait(60)
    assert actor.call("nothing").result() == ({}, [])


def test_restart_ends_an_actor_that_lives(actor):
    first = actor.call("report").result()[0]["pid"]
    future = actor.call("wait", {"seconds": 600})
    actor.restart()
    with pytest.raises(ActorDied):
        future.result(60)
    assert actor.call("report").result()[0]["pid"] != first


def test_a_client_finds_the_restarted_actor(actor):
    client = connect_actor(actor.address)
    client.call("nothing").result()
    actor.kill()
    with pytest.raises(ActorDied):
        client.call("nothing").result(60)
    actor.restart()
    assert client.call("nothing").result(60) == ({}, [])
    client.close()


def test_actors_call_each_other(engine, actor):
    friend = engine.start("friend", ECHO, {})
    friend.call("befriend", {"address": actor.address}).result()
    sent = np.arange(100_000)
    _, (got,) = friend.call("ask", {"method": "echo"}, [sent]).result(60)
    assert np.array_equal(got, sent)
    with pytest.raises(RemoteError, match="RemoteError: KeyError"):
        friend.call("ask", {"method": "raises"}).result(60)
    actor.kill()
    with pytest.raises(RemoteError) as raised:
        friend.call("ask", {"method": "nothing"}).result(60)
    assert isinstance(raised.value.original, ActorDied)
    friend.kill()


def test_nobody_waits_for_a_client_that_does_not_read(actor):
    slow, quick = connect_actor(actor.address), connect_actor(actor.address)
    large = np.ones(4_000_000)
    answers = [slow.call("echo", {}, [large]) for _ in range(2)]
    assert quick.call("nothing").result(60) == ({}, [])
    assert all(np.array_equal(answer.result(60)[1][0], large) for answer in answers)
    slow.close()
    quick.close()


def _together(tasks):
    failures = []

    def run(task):
        try:
            task()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=[task]) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
