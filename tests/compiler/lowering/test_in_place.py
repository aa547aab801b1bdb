"""Programs that update their inputs in place compute what functional ones do, in less memory."""

import operator
import random
import sys
from itertools import combinations

import pytest
import torch
from torch import fx

from mirror.compiler.lowering.in_place import update_in_place

aten = torch.ops.aten


class Builder:
    """Builds a graph of operations together with the values of its nodes."""

    def __init__(self, *inputs):
        self.graph = fx.Graph()
        self.inputs = [
            self._keep(self.graph.placeholder(f"in_{i}"), x) for i, x in enumerate(inputs)
        ]

    def _keep(self, node, value):
        node.meta["val"] = value
        return node

    def call(self, target, *args, **kwargs):
        values = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        node = self.graph.call_function(target, args, kwargs)
        return self._keep(node, target(*values[0], **values[1]))

    def each(self, target, *args):
        found = self.call(target, *args)
        return [self.call(operator.getitem, found, i) for i in range(len(found.meta["val"]))]

    def finish(self, writes, results=()):
        """Ends the graph; ``writes`` gives the last value of each input that is changed."""
        for before, after in writes.items():
            self.graph.call_function(aten.copy_.default, (before, after))
        self.graph.output(list(results))
        return self.graph


def run(graph, inputs):
    """Returns the results, the inputs after the run, and which results share memory with what."""
    inputs = [x.clone() for x in inputs]
    results = fx.Interpreter(fx.GraphModule({}, graph)).run(*inputs)
    places = [x.untyped_storage().data_ptr() for x in (*inputs, *results)]
    shared = {
        pair for pair in combinations(range(len(places)), 2) if len({places[i] for i in pair}) == 1
    }
    return [*results, *inputs], shared


def assert_equal_results(graph, inputs):
    """Compares a graph with its in-place form, which it returns."""
    expected, shared = run(graph, inputs)
    changed = fx.Graph()
    changed.output(changed.graph_copy(graph, {}))
    for before, after in zip(graph.nodes, changed.nodes, strict=True):
        after.meta = dict(before.meta)
    update_in_place(changed)
    changed.lint()
    found, shared_now = run(changed, inputs)
    assert all(map(torch.equal, found, expected))
    assert shared_now <= shared
    return changed


def names_of(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_an_update_needs_no_copies():
    p, m, g = (torch.randn(3, 2) for _ in range(3))
    built = Builder(p, m, g)
    before, momentum, grad = built.inputs
    momentum = built.call(aten.mul.Tensor, momentum, 0.9)
    momentum = built.call(aten.add.Tensor, momentum, built.call(aten.clone.default, grad))
    held = built.call(aten.detach.default, before)
    after = built.call(aten.add.Tensor, held, momentum, alpha=-0.1)
    graph = built.finish({before: after, built.inputs[1]: momentum})
    assert names_of(assert_equal_results(graph, [p, m, g])) == [
        "aten.mul_.Tensor",
        "aten.add_.Tensor",
        "aten.detach.default",
        "aten.add_.Tensor",
    ]


def test_lists_are_updated_at_once():
    values = [torch.randn(3), torch.randn(2)]
    grads = [torch.randn(3), torch.randn(2)]
    built = Builder(*values, *grads)
    after = built.each(aten._foreach_add.List, built.inputs[:2], built.inputs[2:])
    graph = built.finish(dict(zip(built.inputs[:2], after, strict=True)))
    assert names_of(assert_equal_results(graph, values + grads)) == ["aten._foreach_add_.List"]


def test_the_calls_of_a_longer_list_grow_with_its_length():
    def num_calls(length):
        values = [torch.zeros(2) for _ in range(2 * length)]
        built = Builder(*values)
        before, grads = built.inputs[:length], built.inputs[length:]
        after = built.each(aten._foreach_add.List, before, grads)
        graph = built.finish(dict(zip(before, after, strict=True)))
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(None) if event == "call" else None)
        try:
            update_in_place(graph)
        finally:
            sys.setprofile(None)
        return len(calls)

    num_calls(2)  # what is called once in a process
    assert num_calls(80) < 2.5 * num_calls(40)


def return_result(built, x, y):
    after = built.call(aten.add.Tensor, x, y)
    return {x: after}, [after]


def return_view(built, x, y):
    after = built.call(aten.add.Tensor, x, y)
    return {x: after}, [built.call(aten.view.default, after, [-1])]


def read_later(built, x, y):
    after = built.call(aten.mul.Tensor, x, 2.0)
    return {x: after}, [built.call(aten.add.Tensor, x, y)]


def read_later_through_a_view(built, x, y):
    seen = built.call(aten._unsafe_view.default, x, [2, 2])
    after = built.call(aten.mul.Tensor, x, 2.0)
    return {x: after}, [built.call(aten.add.Tensor, seen, y)]


def read_twice_at_once(built, x, y):
    return {x: built.call(aten.add.Tensor, x, built.call(aten.t.default, x))}, []


def compute_in_another_dtype(built, x, y):
    y = built.call(aten.to.dtype, y, torch.float64)
    exact = built.call(aten.mul.Tensor, x, y)
    return {x: built.call(aten.sub.Tensor, exact, y)}, []


def read_in_the_same_list(built, x, y):
    first, second = built.each(aten._foreach_add.List, [x, y], [y, x])
    return {x: first, y: second}, []


def transpose(built, x, y):
    turned = built.call(aten.t.default, built.call(aten.mul.Tensor, x, 2.0))
    return {x: built.call(aten.add.Tensor, turned, y)}, []


def exchange(built, x, y):
    after = built.call(aten.mul.Tensor, x, 2.0)
    other = built.call(aten.mul.Tensor, y, 3.0)
    return {x: other, y: after}, []


def write_to_two(built, x, y):
    after = built.call(aten.mul.Tensor, x, 2.0)
    return {x: after, y: after}, []


def return_clone(built, x, y):
    copied = built.call(aten.clone.default, y)
    return {x: built.call(aten.mul.Tensor, x, copied)}, [copied]


def clone_old_value(built, x, y):
    former = built.call(aten.clone.default, x)
    after = built.call(aten.mul.Tensor, x, 2.0)
    return {x: after}, [built.call(aten.add.Tensor, former, y)]


def list_one_input_twice(built, x, y):
    first, second = built.each(aten._foreach_mul.Scalar, [x, x], 2.0)
    return {x: first}, [built.call(aten.add.Tensor, second, y)]


@pytest.mark.parametrize(
    "program",
    [
        return_result,
        return_view,
        read_later,
        read_later_through_a_view,
        read_twice_at_once,
        compute_in_another_dtype,
        read_in_the_same_list,
        transpose,
        exchange,
        write_to_two,
        return_clone,
        clone_old_value,
        list_one_input_twice,
    ],
    ids=lambda program: program.__name__,
)
def test_what_is_still_needed_is_not_overwritten(program):
    inputs = [torch.randn(2, 2), torch.randn(2, 2)]
    built = Builder(*inputs)
    assert_equal_results(built.finish(*program(built, *built.inputs)), inputs)


def draw_program(seed):
    """Returns the graph of a random program, and its inputs."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    inputs = [torch.randn(2, 2) for _ in range(draw.randint(1, 4))]
    built = Builder(*inputs)
    known = list(built.inputs)
    for _ in range(draw.randint(2, 10)):
        recent = known[-4:] if draw.random() < 0.7 else known
        a, b, c = (draw.choice(recent) for _ in range(3))
        kind = draw.randrange(8)
        if kind == 0:
            known.append(built.call(aten.detach.default, a))
        elif kind == 1:
            known.append(built.call(draw.choice([aten.t.default, aten.clone.default]), a))
        elif kind == 2:
            known.append(built.call(aten.addcmul.default, a, b, c))
        elif kind == 3:
            known += built.each(aten._foreach_add.List, [a, b], [b, c])
        elif kind == 4:
            known += built.each(aten._foreach_mul.Scalar, [a, b], 0.5)
        elif kind == 5:
            known.append(built.call(aten.mul.Tensor, a, 0.5))
        else:
            known.append(built.call(aten.sub.Tensor, a, b))
    written = draw.sample(built.inputs, draw.randint(1, len(built.inputs)))
    views = aten.detach.default, aten.t.default
    known += [built.call(aten.neg.default, known[-1])]
    values = [one for one in known if one.op != "placeholder" and one.target not in views]
    writes = {before: draw.choice(values[-5:]) for before in written}
    results = draw.sample(known, draw.randint(0, min(2, len(known))))
    return built.finish(writes, results), inputs


def test_random_programs_compute_the_same_in_place():
    changed = [assert_equal_results(*draw_program(seed)) for seed in range(200)]
    num_in_place = sum("_." in name for graph in changed for name in names_of(graph))
    assert num_in_place > 50  # otherwise nothing was tested
