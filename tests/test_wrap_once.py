"""Functions of torch are replaced once, and stay unchanged for other code."""

import inspect
import threading
import types

import pytest

from mirror.base.torch_private import wrap_once, wrapping


class Base:
    """What libraries have: methods of every kind."""

    @classmethod
    def make(cls, value):
        """Makes."""
        return cls.__name__, value

    @staticmethod
    def add(a, b):
        """Adds."""
        return a + b

    def call(self, value):
        """Calls."""
        return type(self).__name__, value


def _count_calls(original):
    def function(*args, **kwargs):
        calls.append(original.__name__)
        return original(*args, **kwargs)

    return function


def _also_noted(original):
    return _count_calls(original)


calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls():
    calls.clear()


@pytest.fixture
def kind():
    return type("Kind", (Base,), dict(vars(Base)))


@pytest.mark.parametrize(
    ("name", "args", "result"),
    [("make", (3,), ("Kind", 3)), ("add", (1, 2), 3), ("call", (3,), ("Kind", 3))],
)
def test_methods_of_every_kind_are_wrapped_once(kind, name, args, result):
    before = inspect.getattr_static(kind, name)
    assert [wrap_once(kind, name, _count_calls) for _ in range(3)] == [True, False, False]
    assert getattr(kind(), name)(*args) == result
    assert calls == [name]
    after = inspect.getattr_static(kind, name)
    assert type(after) is type(before)
    assert getattr(kind, name).__doc__ == getattr(Base, name).__doc__
    assert getattr(kind, name).__wrapped__ is getattr(before, "__func__", before)


def test_class_methods_and_functions_in_c_are_wrapped():
    kind = type("Kind", (dict,), {})
    assert wrap_once(kind, "fromkeys", _count_calls)
    assert not wrap_once(kind, "fromkeys", _count_calls)
    assert kind.fromkeys("ab") == {"a": None, "b": None}
    assert type(kind.fromkeys("ab")) is kind
    assert wrap_once(kind, "__init__", _count_calls)
    assert kind(a=1) == {"a": 1}
    module = types.SimpleNamespace(length=len)
    assert wrap_once(module, "length", _count_calls)
    assert not wrap_once(module, "length", _count_calls)
    assert module.length("ab") == 2
    assert calls == ["fromkeys", "fromkeys", "__init__", "len"]


def test_every_wrapper_has_its_own_turn(kind):
    assert wrap_once(kind, "call", _count_calls)
    assert wrap_once(kind, "call", _also_noted)
    assert not wrap_once(kind, "call", _count_calls)
    assert not wrap_once(kind, "call", _also_noted)
    kind().call(1)
    assert calls == ["call", "call"]


def test_what_others_put_around_it_stays(kind):
    wrap_once(kind, "call", _count_calls)
    kind.call = _also_noted(kind.call)
    others = kind.call
    # As functools.wraps does; without its mark nothing tells what is inside.
    vars(others).update(vars(others.__closure__[0].cell_contents))
    assert not wrap_once(kind, "call", _count_calls)
    assert kind.call is others


def test_a_subclass_is_another_owner(kind):
    child = type("Child", (kind,), {})
    wrap_once(kind, "call", _count_calls)
    assert wrap_once(child, "call", _count_calls)
    assert "call" in vars(child)
    child().call(1)
    assert calls == ["call", "call"]


def test_marks_of_the_wrapper_stay(kind):
    def marked(original):
        function = _count_calls(original)
        function.mark = "ours"
        return function

    kind.call.mark = "theirs"
    kind.call.other = "theirs"
    wrap_once(kind, "call", marked)
    assert (kind.call.mark, kind.call.other) == ("ours", "theirs")


def test_threads_wrap_once_together(kind):
    both = threading.Barrier(8)
    done = []

    def thread():
        both.wait()
        done.append(wrap_once(kind, "call", _count_calls))

    threads = [threading.Thread(target=thread) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(done) == [False] * 7 + [True]


def test_what_is_not_there_cannot_be_wrapped(kind):
    with pytest.raises(AttributeError):
        wrap_once(kind, "missing", _count_calls)


@pytest.mark.parametrize("name", ["make", "add", "call"])
def test_a_wrapper_of_a_block_is_taken_out_after_it(kind, name):
    wrap_once(kind, name, _also_noted)
    before = vars(kind)[name]
    with pytest.raises(KeyError), wrapping(kind, name, _count_calls):
        getattr(kind(), name)(*[1] * (2 if name == "add" else 1))
        assert not wrap_once(kind, name, _also_noted)
        raise KeyError
    assert calls == [name, name]
    assert vars(kind)[name] is before
