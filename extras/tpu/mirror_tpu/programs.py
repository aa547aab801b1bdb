"""The programs of one strategy: a user's step for all replicas, compiled by jax for its arguments.

Programs are kept by key, created when needed, and run on copies of tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from mirror.errors import StrategyError
from mirror.server.recorded_model import Model
from mirror_tpu.arguments import (
    ProgramOutput,
    TpuArguments,
    TpuCopies,
    find_widest,
    is_static,
    regroup_outputs,
    split_arrays,
)
from mirror_tpu.optimizers import apply_rule, flags_of, rule_of, state_on_host
from mirror_tpu.refusals import WHOLE_STEPS
from mirror_tpu.torchax_library import Library
from mirror_tpu.trace import Phase, ReachedParams, TracedCall

_AXIS = "replica"
StateKey = tuple[int, int, str]  # an optimizer's number, a parameter's position, a name


class TpuProgram:
    """One step, traced for one kind of arguments; calling it runs it on all devices.

    Args:
        mesh: jax's mesh of the devices.
        optimizers: all optimizers with parameters of the model.

    Attributes:
        stepped: indices of the optimizers that step.
        has_backward: whether there is a backward pass.
        state_keys: the optimizer states that are inputs and outputs.
        updated: indices of the parameters that it changes.
        buffers: indices of the buffers that it may change.
        outputs: one per kind of replica; ``None`` for an idle one.
        traces: the number of times that the step's Python has run.
    """

    def __init__(
        self,
        library: Library,
        mesh: Any,
        strategy: Any,
        model: Model,
        optimizers: Sequence[Optimizer],
        fn: Callable[..., Any],
        arguments: TpuArguments,
        values: Sequence[Any],
    ) -> None:
        self._library, self._strategy, self._model = library, strategy, model
        self._optimizers, self._fn, self._arguments = tuple(optimizers), fn, arguments
        self.traces = 0
        self.stepped: list[int] = []
        self.has_backward = False
        buffers: set[int] = set()
        self.outputs: list[ProgramOutput | None] = []
        for k, shapes in enumerate(arguments.sizes):
            self.outputs.append(None if shapes is None else self._inspect(k, values, buffers))
        self.buffers = sorted(buffers)
        self._widest = find_widest(self.outputs)
        self._flags = {n: flags_of(self._optimizers[n]) for n in self.stepped}
        self._positions = {id(tensor): i for i, tensor in enumerate(model.tensors)}
        self._reached = self._find_reached(values) if self.has_backward else frozenset()
        self.groups = {n: self._groups_of(n) for n in self.stepped}
        self.updated = sorted(i for groups in self.groups.values() for i, _ in groups)
        self.state_keys: list[StateKey] = [
            (n, i, name)
            for n in self.stepped
            for i, g in self.groups[n]
            for name in rule_of(self._optimizers[n]).names(self._flags[n][g])
        ]
        jax = library.jax
        spec = jax.sharding.PartitionSpec
        one, each = spec(), spec(_AXIS)
        body = jax.shard_map(
            self._body,
            mesh=mesh,
            in_specs=(one, one, one, one, one, each, each, each),
            out_specs=(each, one, one, one),
            check_vma=False,
        )
        self.compiled = jax.jit(body)

    def _groups_of(self, n: int) -> list[tuple[int, int]]:
        """Returns index and group of each parameter that an optimizer changes."""
        return [
            (i, g)
            for g, group in enumerate(self._optimizers[n].param_groups)
            for i in (self._positions[id(p)] for p in group["params"])
            if i in self._reached and self._model.tensors[i].requires_grad
        ]

    def host_numbers(self, n: int, i: int, g: int) -> list[float]:
        """Returns the current numbers that an optimizer's step needs for a parameter."""
        optimizer = self._optimizers[n]
        rule, state = rule_of(optimizer), optimizer.state.get(self._model.tensors[i], {})
        first = next(iter(rule.names(self._flags[n][g])), None)
        return list(
            rule.numbers(optimizer.param_groups[g], state, first and state.get(first) is None)
        )

    # Tracing

    def _call(
        self, phase: Phase, k: int, values: Sequence[Any], key: Any, inputs: Any, **more: Any
    ) -> tuple[TracedCall, Any]:
        self.traces += 1
        library, arguments = self._library, self._arguments
        shapes = arguments.sizes[k]
        assert shapes is not None
        shared, parts = inputs
        cut = [x[tuple(slice(n) for n in s)] for x, s in zip(parts, shapes, strict=True)]
        tensor = library.env.j2t_iso
        args, kwargs = arguments.rebuild([*map(tensor, cut)], [*map(tensor, shared)])
        call = TracedCall(
            library, phase, self._strategy, self._model, self._optimizers, values, **more
        )
        return call, call(key, self._fn, args, kwargs)

    def _inspect(self, k: int, values: Sequence[Any], buffers: set[int]) -> ProgramOutput:
        """Traces a branch abstractly, and records its effects and outputs."""
        library, jax, seen = self._library, self._library.jax, []

        def inspect(values: Any, key: Any, inputs: Any) -> Any:
            call, result = self._call(Phase.INSPECT, k, values, key, inputs)
            arrays, output = split_arrays(library.env, result)
            seen.append((call, output))
            return arrays

        inputs = (
            [*map(_make_abstract(jax), self._arguments.shared)],
            [_make_abstract(jax)(x[0]) for x in self._arguments.parts],
        )
        shapes = jax.eval_shape(inspect, list(values), jax.random.PRNGKey(0), inputs)
        call, output = seen[-1]
        found = iter(shapes)
        output.leaves = [leaf if type(leaf) is list else next(found) for leaf in output.leaves]
        if any(o is not None for o in self.outputs):
            if (call.stepped, call.has_backward) != (self.stepped, self.has_backward):
                raise StrategyError(
                    "the step calls backward, or an optimizer's step, for some numbers of "
                    "examples only; make the same calls for all sizes"
                )
        self.stepped, self.has_backward = call.stepped, call.has_backward
        if self.stepped and not self.has_backward:
            raise StrategyError("the step calls an optimizer's step without a backward pass")
        buffers.update(call.buffers)
        return output

    def _find_reached(self, values: Sequence[Any]) -> frozenset[int]:
        """Returns the indices of the parameters that a gradient of the loss flows to."""
        jax, arguments = self._library.jax, self._arguments
        k = next(i for i, shapes in enumerate(arguments.sizes) if shapes is not None)
        inputs = (
            [*map(_make_abstract(jax), arguments.shared)],
            [_make_abstract(jax)(x[0]) for x in arguments.parts],
        )
        parameters = self._model.tensors[: self._model.num_parameters]
        positions = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]

        def gradients(chosen: Any, seed: Any, values: Any, key: Any, inputs: Any) -> Any:
            loss, pull = jax.vjp(self._loss(k, positions, values, key, inputs), chosen)
            return loss, pull(seed.astype(loss.dtype))[0]

        held = {
            self._positions[id(p)]
            for n in self.stepped
            for group in self._optimizers[n].param_groups
            for p in group["params"]
        }
        names = [self._model.variables[i].name if i in held else None for i in positions]
        chosen, key = [values[i] for i in positions], jax.random.PRNGKey(0)
        found = find_reached(jax, gradients, names, chosen, (list(values), key, inputs))
        return frozenset(positions[i] for i in found)

    def _loss(self, k: int, positions: list[int], values: Any, key: Any, inputs: Any) -> Any:
        """Returns the loss as a function of the parameters with these indices."""

        def loss(chosen: Any) -> Any:
            every = list(values)
            for i, value in zip(positions, chosen, strict=True):
                every[i] = value
            try:
                self._call(Phase.DIFFERENTIATE, k, every, key, inputs)
            except ReachedParams as reached_it:
                return self._library.env.t2j_iso(reached_it.loss).reshape(())
            raise StrategyError("the step calls backward in one trace, and not in another one")

        return loss

    # The program, seen by one replica

    def _body(
        self,
        values: Any,
        states: Any,
        numbers: Any,
        seed: Any,
        shared: Any,
        which: Any,
        count: Any,
        parts: Any,
    ) -> Any:
        jax, lax, jnp = self._library.jax, self._library.jax.lax, self._library.jax.numpy
        which, count = which[0], count[0]
        inputs = shared, [x[0] for x in parts]
        key = jax.random.fold_in(jax.random.PRNGKey(seed), lax.axis_index(_AXIS))
        positions = sorted(self._reached)
        takes_part = jnp.asarray([shapes is not None for shapes in self._arguments.sizes])[which]
        grads: list[Any] = []

        def choose(branches: list[Any], *operands: Any) -> Any:
            if len(branches) == 1:
                return branches[0](*operands)
            return lax.switch(which, branches, *operands)

        def differentiate(k: int) -> Any:
            if self._arguments.sizes[k] is None:
                return lambda chosen: [jnp.zeros_like(x) for x in chosen]
            return jax.grad(self._loss(k, positions, values, key, inputs))

        branches = range(len(self._arguments.sizes))
        if self.has_backward:
            grads = choose([differentiate(k) for k in branches], [values[i] for i in positions])
            share = count / lax.psum(count, _AXIS)
            # The gradient of a part with weight 0 may be NaN.
            own = [jnp.where(share > 0, g * share.astype(g.dtype), 0) for g in grads]
            grads = lax.psum(own, _AXIS)

        def finish(k: int) -> Any:
            def finish_replica(values: Any, grads: Any) -> Any:
                if self._arguments.sizes[k] is None:
                    return self._zeros(jnp), *self._keep_values(values, states)
                return self._run_to_end(
                    k,
                    values,
                    states,
                    numbers,
                    key,
                    inputs,
                    dict(zip(positions, grads, strict=True)),
                )

            return finish_replica

        outputs, parameters, after, buffers = choose(
            [finish(k) for k in branches], list(values), grads
        )
        first = lax.pmin(jnp.where(takes_part, lax.axis_index(_AXIS), 2**30), _AXIS)
        is_first = lax.axis_index(_AXIS) == first

        def broadcast_first(x: Any) -> Any:
            kind = jnp.int8 if x.dtype == jnp.bool_ else x.dtype
            whole = lax.psum(jnp.where(is_first, x.astype(kind), 0), _AXIS)
            return whole.astype(x.dtype)

        if len(self._arguments.sizes) > 1:
            # Branches may round differently: all replicas take the bits of one.
            parameters, after = jax.tree.map(broadcast_first, (parameters, after))
        number = lax.psum(takes_part.astype(jnp.float32), _AXIS)

        def combine(x: Any) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return broadcast_first(x)
            return lax.psum(jnp.where(takes_part, x, 0), _AXIS) / number.astype(x.dtype)

        return (
            [x[None] for x in outputs],
            parameters,
            after,
            [combine(buffer) for buffer in buffers],
        )

    def _run_to_end(
        self,
        k: int,
        values: Any,
        states: Any,
        numbers: Any,
        key: Any,
        inputs: Any,
        grads: dict[int, Any],
    ) -> Any:
        after = dict(zip(self.state_keys, states, strict=True))
        parameters = {i: values[i] for i in self.updated}

        def apply(n: int, own: dict[int, Any], found: dict[int, Any]) -> dict[int, Any]:
            rule, changed = rule_of(self._optimizers[n]), {}
            for row, (i, g) in enumerate(self.groups[n]):
                if i not in found:
                    raise StrategyError(
                        f"the step has put None into the gradient of "
                        f"{self._model.variables[i].name} before the optimizer's step; put zeros "
                        "there, or take it out of the optimizer"
                    )
                flags = self._flags[n][g]
                names = rule.names(flags)
                state = {name: after[n, i, name] for name in names}
                changed[i], state = apply_rule(
                    self._library.jax.numpy,
                    rule,
                    flags,
                    own[i],
                    found[i],
                    state,
                    numbers[self.stepped.index(n)][row],
                )
                after.update({(n, i, name): state[name] for name in names})
            parameters.update(changed)
            return changed

        call, result = self._call(Phase.FINISH, k, values, key, inputs, grads=grads, apply=apply)
        arrays, _ = split_arrays(self._library.env, result)
        jnp = self._library.jax.numpy
        padded = [
            jnp.zeros(shape, dtype).at[tuple(slice(n) for n in x.shape)].set(x)
            for x, (shape, dtype) in zip(arrays, self._widest, strict=True)
        ]
        return (
            padded,
            [parameters[i] for i in self.updated],
            [after[key] for key in self.state_keys],
            [call.buffers.get(i, values[i]) for i in self.buffers],
        )

    def _zeros(self, jnp: Any) -> list[Any]:
        return [jnp.zeros(shape, dtype) for shape, dtype in self._widest]

    def _keep_values(self, values: Any, states: Any) -> tuple[Any, Any, Any]:
        return ([values[i] for i in self.updated], list(states), [values[i] for i in self.buffers])


def _make_abstract(jax: Any) -> Callable[[Any], Any]:
    def shape_of(x: Any) -> Any:
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype)

    return shape_of


def find_reached(
    jax: Any, gradients: Any, names: Sequence[str | None], chosen: Any, others: Sequence[Any]
) -> list[int]:
    """Returns the indices of the parameters that a gradient flows to.

    jax returns zeros for a parameter that the loss does not depend on. torch leaves ``p.grad`` at
    None, and its optimizers skip it: with zeros, weight decay and momentum would change it.

    Args:
        gradients: a function of ``chosen``, of the gradient of the loss itself, and of ``others``;
            it returns the loss and one gradient for each parameter.
        names: the names of parameters of an optimizer of the step; ``None`` for others.

    Raises:
        StrategyError: a parameter is used, but no gradient flows to it: torch might have zeros.
    """
    seed = jax.numpy.ones((), "float32")
    closed = jax.make_jaxpr(gradients)(chosen, seed, *others)
    jaxpr, number = closed.jaxpr, len(chosen)
    loss_needs = _needs(jaxpr, 0)
    found = []
    for i in range(number):
        # A gradient flows to the parameter if it depends on the gradient of the loss.
        if _needs(jaxpr, 1 + i)[number]:
            found.append(i)
        elif loss_needs[i] and names[i] is not None:
            raise StrategyError(
                f"the step uses {names[i]}, but no gradient flows back to it (detach, no_grad, "
                "round); a program for TPUs cannot tell whether torch would have zeros or None: "
                "use requires_grad_(False) for it"
            )
    return found


def _needs(jaxpr: Any, output: int) -> list[bool]:
    """Returns for each input whether an output depends on it."""
    wanted = [i == output for i in range(len(jaxpr.outvars))]
    _, used = import_module("jax.interpreters.partial_eval").dce_jaxpr(jaxpr, wanted)
    return list(used)


_MOST = 64  # the number of programs that are kept: one per step and kind of batch


class TpuPrograms:
    """Runs steps as programs, and creates these when there is none yet.

    Args:
        devices: jax's devices.
        strategy: the strategy that is current in steps.

    Attributes:
        copies: the tensors' copies on the devices.
        kept: the programs, by the key of the facts that they depend on.
    """

    def __init__(self, library: Library, devices: Sequence[Any], strategy: Any) -> None:
        self._library, self._strategy = library, strategy
        sharding = library.jax.sharding
        self._mesh = sharding.Mesh(np.array(devices), ("replica",))
        self._one = sharding.NamedSharding(self._mesh, sharding.PartitionSpec())
        self._each = sharding.NamedSharding(self._mesh, sharding.PartitionSpec("replica"))
        self.copies = TpuCopies(library.jax, self._one)
        self.kept: OrderedDict[Any, TpuProgram] = OrderedDict()

    def run(
        self,
        fn: Callable[..., Any],
        arguments: TpuArguments,
        model: Model,
        optimizers: Sequence[Optimizer],
    ) -> tuple[Any, bool]:
        """Runs a step; returns its regrouped results, and whether an optimizer has stepped."""
        with self._torch_precision():
            return self._run(fn, arguments, model, optimizers)

    def clear(self) -> None:
        """Drops all programs and copies."""
        self.kept.clear()
        self.copies.clear()

    def _run(
        self,
        fn: Callable[..., Any],
        arguments: TpuArguments,
        model: Model,
        optimizers: Sequence[Optimizer],
    ) -> tuple[Any, bool]:
        jax = self._library.jax
        values = [self.copies.device_copy(id(t), t) for t in model.tensors]
        key = tpu_program_key(fn, arguments, model, optimizers)
        program = self.kept.get(key)
        if program is None:
            mesh, strategy = self._mesh, self._strategy
            program = self.kept[key] = TpuProgram(
                self._library, mesh, strategy, model, optimizers, fn, arguments, values
            )
            while len(self.kept) > _MOST:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        states = [
            self.copies.device_copy(
                (id(model.tensors[i]), id(optimizers[n]), name),
                state_on_host(optimizers[n], model.tensors[i], name),
            )
            for n, i, name in program.state_keys
        ]
        numbers = [
            np.array([program.host_numbers(n, i, g) for i, g in program.groups[n]])
            for n in program.stepped
        ]
        # From the generator that checkpoints save; every replica derives its own key.
        seed = np.uint32(torch.randint(2**31, ()).item())
        each = [np.array(arguments.which, "int32"), np.array(arguments.counts), arguments.parts]
        outputs, parameters, after, buffers = program.compiled(
            values,
            states,
            *jax.device_put((numbers, seed, arguments.shared), self._one),
            *jax.device_put(each, self._each),
        )
        self._write_back(model, optimizers, program, parameters, after, buffers)
        # A backward pass from such results, outside run, would find no graph.
        is_wanted = any(t.requires_grad for t in model.tensors[: model.num_parameters])
        ends_here = is_wanted and torch.is_grad_enabled() and not program.has_backward
        refusal = WHOLE_STEPS if ends_here else None
        results = regroup_outputs(program.outputs, outputs, arguments, refusal)
        return results, bool(program.stepped)

    def _write_back(
        self,
        model: Model,
        optimizers: Sequence[Optimizer],
        program: TpuProgram,
        parameters: Sequence[Any],
        after: Sequence[Any],
        buffers: Sequence[Any],
    ) -> None:
        """Writes the values that a run has changed into the user's tensors."""
        changed = zip((*program.updated, *program.buffers), (*parameters, *buffers), strict=True)
        for i, array in changed:
            self.copies.put(id(model.tensors[i]), array, model.tensors[i])
        for (n, i, name), array in zip(program.state_keys, after, strict=True):
            tensor, optimizer = model.tensors[i], optimizers[n]
            state = optimizer.state[tensor]
            if state.get(name) is None:
                state[name] = torch.zeros_like(tensor.detach())
            self.copies.put((id(tensor), id(optimizer), name), array, state[name])
        for n in program.stepped:
            vars(optimizers[n])["_opt_called"] = True  # otherwise a scheduler would warn
            for i, _ in program.groups[n]:
                rule_of(optimizers[n]).count(optimizers[n].state[model.tensors[i]])

    @contextmanager
    def _torch_precision(self) -> Iterator[None]:
        """Makes jax compute like torch: 64-bit types, float32 products in float32."""
        jax = self._library.jax
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            yield


def tpu_program_key(
    fn: Callable[..., Any], arguments: TpuArguments, model: Model, optimizers: Sequence[Optimizer]
) -> Any:
    """Returns the key of a step's program; a step with a new key is traced again.

    Of the step's closure and globals, and of modules' attributes, it has the numbers, strings and
    flags, and lists and tuples of them.
    """
    of_modules = [
        [(k, v) for k, v in vars(module).items() if is_static(v) and not k.startswith("_")]
        for module in model.modules
    ]
    return (
        fn,
        arguments.key,
        repr(_read_free_values(fn)),
        repr(of_modules),
        tuple(model.identity()),
        tuple(model.flags()),
        tuple((id(o), flags_of(o), _members(o)) for o in optimizers),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    )


def _read_free_values(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Returns the plain values of a function's globals and closure, by name."""
    inner: Any = getattr(fn, "__func__", fn)
    code = getattr(inner, "__code__", None)
    if code is None:
        return []
    seen = {name: inner.__globals__[name] for name in code.co_names if name in inner.__globals__}
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=True):
        try:
            seen[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return sorted((name, value) for name, value in seen.items() if is_static(value))


def _members(optimizer: Optimizer) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)
