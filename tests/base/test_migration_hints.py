"""migration_hints.py: names of other libraries are answered by mirror's name; every entry."""

import ast
import copy
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mirror
from mirror.base import migration_hints

TABLE = migration_hints.table()
MODULES = {
    "mirror": mirror,
    "mirror.amp": mirror.amp,
    "mirror.cluster": mirror.cluster,
    "mirror.comm": mirror.comm,
    "mirror.data": mirror.data,
    "mirror.metrics": mirror.metrics,
    "mirror.nn": mirror.nn,
    "mirror.server": mirror.server,
    "mirror.train": mirror.train,
}
STRATEGIES = {
    name: getattr(mirror, name)
    for name in (
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "OneDeviceStrategy",
        "CentralStorageStrategy",
        "ParameterServerStrategy",
        "TPUStrategy",
    )
}
CLASSES = STRATEGIES | {
    name: getattr(mirror, name)
    for name in (
        "ReplicaContext",
        "DistributedDataset",
        "Checkpoint",
        "CheckpointManager",
        "PreemptionCheckpointHandler",
    )
}
CALLED = STRATEGIES | {
    name: getattr(mirror, name)
    for name in (
        "CommunicationOptions",
        "InputOptions",
        "CheckpointManager",
        "PreemptionCheckpointHandler",
    )
}
FUNCTIONS = {
    "MirroredStrategy.mirror": mirror.MirroredStrategy.mirror,
    "MirroredStrategy.compile": mirror.MirroredStrategy.compile,
    "mirror.nn.convert_sync_batchnorm": mirror.nn.convert_sync_batchnorm,
}


def signs_of(kind, suffix=""):
    """Yields what a class says, by name: its own, and what it has from the classes above."""
    places = [f"{base.__name__}{suffix}" for base in kind.__mro__]
    for name in sorted({name for place in places for name in TABLE.get(place, ())}):
        yield name, next(TABLE[place][name] for place in places if name in TABLE.get(place, ()))


@pytest.mark.parametrize("place", MODULES)
def test_every_name_on_a_module_names_its_library_and_a_remedy(place):
    for name, sign in TABLE[place].items():
        check_attribute(MODULES[place], name, sign)


@pytest.mark.parametrize("place", CLASSES)
def test_every_name_on_an_object_names_its_library_and_a_remedy(place):
    kind = CLASSES[place]
    thing = object.__new__(kind)  # no devices, no servers: what is missing, is so for all
    for name, sign in signs_of(kind):
        if name in TABLE.get(place, ()) or not hasattr(kind, name):
            check_attribute(thing, name, sign)
    # Where a class has a member of its own, the sign of the class above must not hide it.
    assert not set(TABLE.get(place, ())) & set(dir(kind))


def check_attribute(thing, name, sign):
    with pytest.raises(AttributeError) as error:
        getattr(thing, name)
    text = str(error.value)
    assert f"{name!r} ({sign.library})" in text
    assert text.endswith(f"; {sign.way}")
    assert not hasattr(thing, name)
    assert getattr(thing, name, 5) == 5


@pytest.mark.parametrize("place", CALLED)
def test_every_keyword_of_a_constructor_says_what_to_do(place):
    kind = CALLED[place]
    known = inspect.signature(kind).parameters
    for name, sign in signs_of(kind, "()"):
        if name not in known:
            with pytest.raises(TypeError) as error:
                kind(**{name: None})
            assert str(error.value) == f"{place}() takes no {name!r} ({sign.library}); {sign.way}"
    assert not set(TABLE.get(f"{place}()", ())) & set(known)


@pytest.mark.parametrize("place", FUNCTIONS)
def test_every_keyword_of_a_function_says_what_to_do(place):
    function = FUNCTIONS[place]
    for name, sign in TABLE[f"{place}()"].items():
        assert name not in inspect.signature(function).parameters
        with pytest.raises(TypeError) as error:
            function(None, nn.Linear(1, 1), **{name: None})
        assert str(error.value) == f"{place}() takes no {name!r} ({sign.library}); {sign.way}"


# What there is


def ways():
    """Yields every text with its place, and the class that a program has there, if it is one."""
    for place in (*MODULES, *(f"{name}()" for name in FUNCTIONS)):
        for sign in TABLE[place].values():
            yield place, None, sign.way
    for place, kind in CLASSES.items():
        for name, sign in signs_of(kind):
            if not hasattr(kind, name):
                yield place, kind, sign.way
    for place, kind in CALLED.items():
        for name, sign in signs_of(kind, "()"):
            if name not in inspect.signature(kind).parameters:
                yield f"{place}()", kind, sign.way


WAYS: dict[str, tuple[Any, set[str]]] = {}
for a_place, a_kind, a_way in ways():
    WAYS.setdefault(a_place, (a_kind, set()))[1].add(a_way)
PATH = re.compile(r"\b(?:mirror|strategy|context|torch|copy|nn)(?:\.\w+(?:\(\))?)+")
RETURNED = {"get_replica_context": mirror.ReplicaContext, "get_strategy": mirror.MirroredStrategy}
OPTIONAL = ("mirror.lightning", "mirror.keras")  # which need a library
# Called in the texts by their bare names, after others of the same thing or as Python's own.
BARE = {"iter", "next", "print", "int", "all_gather", "fn", "strategy"}


def find(path, strategy):
    """Returns what a dotted name of a text stands for; AssertionError: there is no such thing."""
    roots = {"mirror": mirror, "torch": torch, "context": mirror.ReplicaContext, "copy": copy}
    roots |= {"strategy": strategy, "nn": nn}
    root, *names = path.split(".")
    found = roots[root]
    for name in names:
        name = name.removesuffix("()")
        if name == "strategy" and found is mirror.ReplicaContext:
            found = mirror.MirroredStrategy
            continue
        assert hasattr(found, name), path
        found = RETURNED.get(name) or getattr(found, name)
    return found


def check_names(way, strategy=mirror.MirroredStrategy):
    """Fails where a text names what there is not: a path, or a keyword of a call."""
    for path in PATH.findall(way):
        module, _, name = path.rpartition(".")
        if module in OPTIONAL:
            source = Path(importlib.util.find_spec(module).origin).read_text()
            assert f'"{name}"' in source.partition("__all__")[2], path
        else:
            find(path, strategy)
    for path, arguments in re.findall(r"\b(mirror(?:\.\w+)+)\(([^()]*)\)", way):
        keywords = re.findall(r"(\w+)=", arguments)
        if keywords:
            known = inspect.signature(find(path, strategy)).parameters
            takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
            assert takes_all or set(keywords) <= set(known), path
    for name in re.findall(r"(?<![.\w])(\w+)\(", way):
        assert name in BARE, name


@pytest.mark.parametrize("place", WAYS)
def test_the_ways_of_a_place_name_what_there_is(place):
    kind, texts = WAYS[place]
    is_call = place.removesuffix("()") in CALLED and place.endswith("()")
    known = inspect.signature(kind if is_call else mirror.MirroredStrategy).parameters
    for way in sorted(texts):
        assert way == way.strip()
        assert way.isascii()
        assert "{" not in way
        check_names(way, kind if kind in STRATEGIES.values() else mirror.MirroredStrategy)
        # What is to be passed is a keyword of what is being made.
        for keyword in re.findall(r"\b(?:pass|here are|and|or) (\w+)=", way):
            assert keyword in known or keyword in CHOSEN.get(place, ()), way


# What a text says is to be passed to something else than the thing at hand.
CHOSEN = {
    "CommunicationOptions()": ["backend"],
    "mirror": ["strategy"],
    "mirror.train": ["strategy"],
}


@pytest.mark.parametrize(
    "way",
    [
        "it is mirror.Server(cluster)",
        "call strategy.distribute(loader)",
        "it is mirror.get_replica_context().broadcast",
        "use mirror.ParameterServerStrategy(resolver=...)",
        "mirror.MirroredStrategy(optimizer=...)",
        "call all_to_all(value)",
    ],
)
def test_a_way_that_names_what_is_not_there_is_found(way):
    with pytest.raises(AssertionError):
        check_names(way)


def test_the_table_is_sorted_into_places_that_exist():
    calls = {f"{name}()" for name in (*CALLED, *FUNCTIONS)}
    assert set(TABLE) <= {*MODULES, *CLASSES, *calls}
    assert all(TABLE.values())
    assert all(sign.library and sign.way for names in TABLE.values() for sign in names.values())


def test_no_name_stands_twice_in_one_place():
    text = migration_hints._FILE.read_text()
    sections = list(migration_hints.entries_of(text))
    assert len(sections) == len(dict(sections))
    for title, entries in sections:
        names = [name for head, _ in entries for name in head.partition(": ")[2].split()]
        assert len(names) == len(set(names)), (title, {n for n in names if names.count(n) > 1})
        if title == "phrases":
            unused = [head for head, _ in entries if f"{{{head}}}" not in text]
            assert unused == []
        else:
            assert all(": " in head for head, _ in entries)


def test_texts_end_up_whole():
    """No line of the file is lost between an entry and the next."""
    text = migration_hints._FILE.read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    read = sum(1 for _, entries in migration_hints.entries_of(text) for _ in entries)
    heads = [line for line in lines if not line.startswith((" ", "["))]
    assert read == len(heads)
    assert max(map(len, lines)) <= 99


def test_a_name_of_no_library_is_an_ordinary_error(objects):
    for place, owner in objects.items():
        for name in ("nobody", "_private", "__dunder__"):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
                getattr(owner, name)
        assert not hasattr(owner, "nobody"), place
    with pytest.raises(TypeError, match="unexpected keyword argument 'nobody'"):
        mirror.MirroredStrategy(["cpu"], nobody=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nobody'"):
        mirror.InputOptions(nobody=1)


def test_a_subclass_may_have_a_keyword_and_a_name_of_its_own():
    class Own(mirror.MirroredStrategy):
        def __init__(self, precision):
            super().__init__(["cpu"])
            self.precision = precision

        def prepare(self):
            return self.precision

    with Own(precision=16) as own:
        assert own.prepare() == 16
        assert repr(own) == "Own([cpu], backend='host')"
        with pytest.raises(AttributeError, match="a Own has no 'setup'"):
            own.setup


def test_signatures_are_what_they_were():
    parameters = list(inspect.signature(mirror.MirroredStrategy).parameters)
    assert parameters[:3] == ["devices", "backend", "communication_options"]
    assert next(iter(inspect.signature(mirror.InputOptions).parameters)) == "prefetch"
    assert mirror.InputOptions() == mirror.InputOptions(2)
    assert hash(mirror.InputOptions()) == hash(mirror.InputOptions(2))


READS_LATE = """
import mirror
from mirror.base import migration_hints as signposts
strategy = mirror.MirroredStrategy(["cpu"] * 2)
strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", 1))
print(signposts.table.cache_info().currsize)
hasattr(strategy, "prepare")
print(signposts.table.cache_info().currsize)
"""


def test_the_table_is_read_when_a_name_is_missing(script_pool):
    done = script_pool.run(READS_LATE)
    assert done.stdout.split() == ["0", "1"]


def test_the_type_checker_still_refuses_unknown_names():
    for module in (mirror, mirror.nn, migration_hints):
        tree = ast.parse(inspect.getsource(module))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert "__getattr__" not in names
    own = (mirror.ParameterServerStrategy, mirror.TPUStrategy)  # their remedies are errors
    for kind in CLASSES.values():
        assert kind in own or "def __getattr__" not in inspect.getsource(kind)
