"""Placing: a piece makes on each device what its trace made on its own, and leaves the host's."""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mirror.compiler.custom_ops import define_ops
from mirror.compiler.lowering.programs import retarget, retarget_with_fakes

FIRST, SECOND, HOST = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


def piece():
    """A graph that makes values on the GPU and on the host, and writes to an input."""
    aten, mode, graph = torch.ops.aten, FakeTensorMode(), fx.Graph()
    x, written = graph.placeholder("x"), graph.placeholder("written")
    with mode:
        x.meta["val"], written.meta["val"] = (torch.empty(4, 3).to(FIRST) for _ in range(2))

    def call(function, *args, **kwargs):
        return graph.call_function(function, args, kwargs)

    made = call(aten.arange.default, 3, device=FIRST, pin_memory=False)
    number = call(aten.full.default, [], 2.0, device=HOST, pin_memory=False)
    there = call(aten._to_copy.default, number, device=FIRST)
    total = call(aten.add.Tensor, call(aten.mul.Tensor, x, made), there)
    call(aten.copy_.default, written, total)
    graph.output([call(aten._to_copy.default, total, device=HOST), made])
    return mode, fx.GraphModule({}, graph)


def devices_of(graph):
    found = []
    for node in graph.graph.nodes:
        found += [v for v in (*node.args, *node.kwargs.values()) if isinstance(v, torch.device)]
    return found


def test_only_the_device_of_the_trace_is_another():
    _, graph = piece()
    before = devices_of(graph)
    there = devices_of(retarget(graph, FIRST, SECOND))

    assert [d if d.type == "cpu" else SECOND for d in before] == there
    assert {d.type for d in there} == {"cpu", "cuda"}
    assert devices_of(graph) == before
    assert retarget(graph, FIRST, FIRST) is graph


def test_a_device_named_without_its_number_is_the_same_one():
    graph = fx.Graph()
    x = graph.placeholder("x")
    where = torch.device("cuda")
    graph.output(graph.call_function(torch.ops.aten._to_copy.default, (x,), {"device": where}))
    assert devices_of(retarget(fx.GraphModule({}, graph), FIRST, SECOND)) == [SECOND]


def test_a_compiler_finds_every_value_where_it_will_be():
    mode, graph = piece()
    own = retarget_with_fakes(graph, mode, FIRST, SECOND)
    values = {n.name: n.meta["val"] for n in own.graph.nodes if n.op != "output"}
    assert {v.device for v in values.values()} == {SECOND, torch.device("cpu")}
    holders = [n.meta["val"].device for n in own.graph.nodes if n.op == "placeholder"]
    assert holders == [SECOND, SECOND]
    assert [str(n.target) for n in own.graph.nodes].count("aten.copy_.default") == 1


def test_what_a_step_draws_is_left_to_the_compiler():
    define_ops()
    mode, graph = FakeTensorMode(), fx.Graph()
    seed = graph.placeholder("seed")
    with mode:
        seed.meta["val"] = torch.zeros((), dtype=torch.int64).to(FIRST)
    drawn = graph.call_function(torch.ops.mirror.draw.default, ([4], seed, 0, "rand"))
    graph.output([drawn])
    own = retarget_with_fakes(fx.GraphModule({}, graph), mode, FIRST, SECOND)
    (node,) = [n for n in own.graph.nodes if str(n.target) == "mirror.draw.default"]
    assert node.meta["val"].device == SECOND
