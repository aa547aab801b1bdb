"""The private names of torch that tracing and compiling a step use; no other file has any.

This file is imported when a step is first compiled: ``import mirror`` imports no compiler.
``torch_names.txt`` lists the names, except those of inductor: importing it takes seconds. If these
are missing, programs run by torch's own kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mirror.base.mutex import Mutex
from mirror.base.safe_files import private_folder
from mirror.compiler.step_errors import is_torchs

_log = logging.getLogger("mirror")

Program = Callable[[list[Any]], Sequence[Any]]

is_fake = FakeTensor
DispatchMode = TorchDispatchMode
is_onednn_on = torch._C._get_mkldnn_enabled
IS_PARAMETER = "_is_param"  # what isinstance(tensor, nn.Parameter) looks at

# The tracer need not count calls of torch's functions: only torch.export reads the counts.
_OPTIONS: dict[str, Any] = {
    name: True
    for name in ("_disable_torch_fn_metadata_mode",)
    if name in inspect.signature(make_fx).parameters
}
_tracing = Mutex()
_PLACE = "mirror_place"  # in the ``meta`` of a node
GENERATED = "<eval_with_key>"  # how the names of fx's generated code begin
_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

# Within the block, batch norms become operations whose schemas say that they write statistics.
declaring_writes = enable_python_dispatcher

_aten = torch.ops.aten
ITEM = _aten._local_scalar_dense.default
UNIQUE = _aten._unique2.default


def schema_of(operation: Any) -> Any:
    """Returns what an operation takes, returns and writes."""
    return operation._schema


def fake_mode() -> Any:
    """Returns a mode in which tensors have shapes, and no values."""
    # Open sizes are of 2 and more: to a trace, sizes of 0 and 1 are other programs.
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def make_fake(
    mode: Any,
    tensor: Tensor,
    batch: Sequence[int] = (),
    dynamic: Sequence[int] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Returns the placeholder of a tensor.

    Args:
        batch: dynamic dimensions; those of equal size now have equal sizes in each call.
        dynamic: dimensions of any size, independent of others.
        device: the device of the placeholder; by default that of the tensor.
    """
    dims = [
        DimDynamic.DUCK
        if d in batch
        else DimDynamic.DYNAMIC
        if d in dynamic
        else DimDynamic.STATIC
        for d in range(tensor.dim())
    ]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    with torch._C.DisableTorchFunction(), _disable_current_modes():  # it may be traced
        fake: Tensor = mode.from_tensor(tensor.detach(), symbolic_context=context)
        if device is not None and fake.device != device:
            with mode:
                fake = fake.to(device)
    return fake


@dataclass(eq=False, slots=True)
class Sizes:
    """The sizes of arguments for which a trace and its programs are valid.

    Attributes:
        known: for each tensor, its dtype and its sizes: numbers, or expressions.
        within: for each symbol, its least and its largest value.
        replaced: symbols that a guard has replaced by a number or an expression.
        guards: other conditions.
    """

    known: list[tuple[torch.dtype, list[Any]]]
    within: dict[Any, tuple[Any, Any]]
    replaced: dict[Any, Any]
    guards: list[Any]

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors have such sizes."""
        found: dict[Any, int] = {}
        composite: list[tuple[Any, int]] = []
        for (dtype, sizes), tensor in zip(self.known, tensors, strict=True):
            if len(sizes) != tensor.dim() or dtype != tensor.dtype:
                return False
            for expression, size in zip(sizes, tensor.shape, strict=True):
                if getattr(expression, "is_Symbol", False):
                    lower, upper = self.within[expression]
                    if found.setdefault(expression, size) != size:
                        return False
                    if not lower <= size <= upper:
                        return False
                elif getattr(expression, "free_symbols", None):
                    composite.append((expression, size))
                elif int(expression) != size:
                    return False
        if any(expression.xreplace(found) != size for expression, size in composite):
            return False
        # A symbol that a guard has replaced has its new value in the shapes, too.
        replaced = {
            symbol: expression.xreplace(self.replaced).xreplace(found)
            for symbol, expression in self.replaced.items()
        }
        sizes_now = {**replaced, **found}
        return all(guard.xreplace(sizes_now) == True for guard in self.guards)  # noqa: E712


def sizes_of(mode: Any, fakes: Sequence[Tensor]) -> Sizes:
    """Returns the sizes for which a trace of ``fakes`` is valid, by its guards so far."""
    env = mode.shape_env
    tensors = [(fake.dtype, without_guards(fake.shape)) for fake in fakes]
    within = {symbol: (known.lower, known.upper) for symbol, known in env.var_to_range.items()}
    return Sizes(tensors, within, dict(env.replacements), [guard.expr for guard in env.guards])


def without_guards(sizes: Sequence[Any]) -> list[Any]:
    """Returns sizes as numbers and expressions: unlike sizes, these are compared without a guard.

    Two sizes that are equal in a trace are different if their expressions are.
    """
    return [getattr(getattr(size, "node", None), "expr", size) for size in sizes]


def describe_sizes(mode: Any) -> str:
    """Returns a description of the sizes of a mode, with their values in the trace."""
    env = mode.shape_env
    # Torch 2.12 and older: var_to_val, which warns in newer ones.
    numbers = getattr(env, "backed_var_to_val", None)
    numbers = env.var_to_val if numbers is None else numbers
    known = [env.var_to_range, env.replacements, numbers]
    return repr([sorted(map(str, one.items())) for one in known] + [[g.expr for g in env.guards]])


def is_operation(target: Any) -> bool:
    """Whether a node of a graph calls an operation of the dispatcher."""
    return isinstance(target, OpOverload)


def constant_of(tensor: Tensor) -> Tensor | None:
    """Returns the value of a fake tensor that was made of one, and not traced."""
    return getattr(tensor, "constant", None)


def trace_graph(
    function: Callable[..., Any],
    mode: Any,
    inputs: Sequence[Any],
    decompositions: Mapping[Any, Any] | None = None,
    *,
    keeps_kernels: bool = False,
) -> fx.GraphModule:
    """Returns the graph of the operations in ``function(*inputs)``, backward passes too.

    Another thread that traces waits: the tracer patches torch for the whole process.

    Args:
        keeps_kernels: whether these are the operations that torch calls without a trace, which
            needs fixed sizes. If not, they are those of torch's compositions in Python, which
            round differently: ``F.interpolate``, recurrent layers, some losses.
    """
    return _tracing.call(_trace_graph, function, mode, inputs, decompositions, keeps_kernels)


def _trace_graph(
    function: Callable[..., Any],
    mode: Any,
    inputs: Sequence[Any],
    decompositions: Mapping[Any, Any] | None,
    keeps_kernels: bool,
) -> fx.GraphModule:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        if not keeps_kernels:
            stack.enter_context(enable_python_dispatcher())
            # Its fused layers, such as LSTM, need fixed sizes.
            stack.enter_context(_disabling_mkldnn())
        stack.enter_context(_silencing_errors())
        stack.enter_context(_use_lazy_graph_module(True))
        options: dict[str, Any] = {"decomposition_table": decompositions, **_OPTIONS}
        return make_fx(function, tracing_mode="real", **options)(*inputs)


def call_noting_place(place: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function; the nodes that it adds to the graph of a trace have ``place`` in ``meta``.

    Args:
        place: the line of the user's code that the call is made for; see ``place_of``.
    """
    mode: Any = get_proxy_mode()
    if mode is None:
        return function(*args, **kwargs)
    last = next(reversed(mode.tracer.graph.nodes))
    result = function(*args, **kwargs)
    node = last.next
    while node.op != "root":
        node.meta.setdefault(_PLACE, place)
        node = node.next
    return result


def place_of(node: fx.Node) -> Any:
    """Returns the line of the user's code that a node was traced for, or ``None``."""
    return node.meta.get(_PLACE)


def node_of(tensor: Tensor) -> fx.Node | None:
    """Returns the node of a tensor in the graph of the trace; ``None``: it is not traced."""
    mode: Any = get_proxy_mode()
    return mode and get_proxy_slot(tensor, mode.tracer, None, lambda of: of.proxy.node)


def run_untraced(function: Callable[[], Any]) -> Any:
    """Calls a function on real tensors in the middle of a trace, which sees nothing of it."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        return function()


class KeepingPlaces(fx.Interpreter):
    """Runs a graph that is traced again; the new nodes have the places of the old ones."""

    def run_node(self, n: fx.Node) -> Any:
        return call_noting_place(place_of(n), super().run_node, n)


def make_untraced(make: Callable[[], Tensor]) -> Tensor:
    """Returns a placeholder that is made during a trace, without an operation in its graph."""
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        return make()


def graph_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Returns a module of a graph; its Python code is generated if it is called."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def has_mkldnn() -> bool:
    """Whether torch calls the kernels of oneDNN for float32 on the CPU."""
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()


@contextlib.contextmanager
def _disabling_mkldnn() -> Iterator[None]:
    before = is_onednn_on()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def _silencing_errors() -> Iterator[None]:
    """Keeps torch from logging an operation that fails in a trace: its error is raised."""
    logger = logging.getLogger(FakeTensor.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


_hiding: set[int] = set()  # threads
_Nothing = type("_Nothing", (), {})
_SUBCLASSES: Any = importlib.import_module("torch._subclasses")


@contextlib.contextmanager
def hiding_fakes() -> Iterator[None]:
    """Within the block, libraries find another class as ``torch._subclasses.FakeTensor``."""

    def find(name: str) -> Any:
        if name != FakeTensor.__name__:
            raise AttributeError(name)
        is_asked = not is_torchs(sys._getframe(1).f_code.co_filename)
        return _Nothing if is_asked and threading.get_ident() in _hiding else FakeTensor

    _hiding.add(threading.get_ident())
    _SUBCLASSES.__getattr__ = find
    vars(_SUBCLASSES).pop(FakeTensor.__name__, None)
    try:
        yield
    finally:
        _hiding.discard(threading.get_ident())
        if not _hiding:
            _SUBCLASSES.FakeTensor = FakeTensor


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Makes ``torch.compiler.is_compiling()`` true: optimizers then count in tensors."""
    names: Any = torch.compiler
    before = names._is_compiling_flag
    names._is_compiling_flag = True
    try:
        yield
    finally:
        names._is_compiling_flag = before


def kernel_decompositions() -> Mapping[Any, Any]:
    """Returns the decompositions that torch's own kernels need in a graph without writes."""
    return {torch.ops.aten.view.default: _view_or_copy}


def inductor_decompositions() -> Mapping[Any, Any]:
    """Returns inductor's decompositions of operations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.lowering")  # adds to the table
        from torch._inductor.decomposition import select_decomp_table

    table: Mapping[Any, Any] = select_decomp_table()
    return {**table, **kernel_decompositions()}


def call_with_fakes(mode: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """Returns what an operation returns for placeholders: placeholders."""
    with mode, enable_python_dispatcher(), torch.no_grad():
        return target(*args, **kwargs)


def _view_or_copy(tensor: Tensor, size: Sequence[Any]) -> Any:
    """Returns a view of a copy if the tensor's layout allows no view.

    A value that replaces a write in place may have another layout than the tensor written to.
    """
    if not tensor.is_contiguous():
        try:
            with disable_proxy_modes_tracing():
                tensor.view(size)
        except (ValueError, RuntimeError):
            return tensor.contiguous().view(size)
    return NotImplemented


def compile_with_inductor(
    graph: fx.GraphModule, mode: Any, inputs: Sequence[Any], guarded: Collection[int] = ()
) -> Program:
    """Compiles a graph without side effects except its last writes.

    Args:
        guarded: the positions of inputs that the program need not check for size and strides.
    """
    with warnings.catch_warnings():  # of what torch itself does
        warnings.simplefilter("ignore")
        return _compile_inner(graph, mode, inputs, guarded)


def _compile_inner(
    graph: fx.GraphModule, mode: Any, inputs: Sequence[Any], guarded: Collection[int]
) -> Program:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    _inductor_folder()
    calls_from_cpp = _calls_from_cpp(inputs)
    _keep_output_strides(graph)

    settings = {
        "cpp_wrapper": calls_from_cpp,
        # The number of threads is the caller's: replicas that run at once have fewer.
        "cpp.dynamic_threads": True,
        # Its keys omit the strides of outputs, and its guards on sizes cannot be evaluated: they
        # name arguments of a function that Dynamo would have traced.
        "fx_graph_cache": False,
    }
    with (
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
        torch.no_grad(),
        config.patch(settings),
        _omitting_assertions(graph, guarded),
    ):
        compiled: Any = compile_fx_inner(
            graph, list(inputs), is_inference=True, cpp_wrapper=calls_from_cpp
        )
    # Without torch's wrappers: 24 Python functions a call.
    program: Program = compiled.current_callable
    return library_program(program) or program


def _calls_from_cpp(inputs: Sequence[Any]) -> bool:
    """Whether a program calls its kernels from C++: on the CPU, where their calls count."""
    return all(t.device.type == "cpu" for t in inputs if isinstance(t, Tensor))


@contextlib.contextmanager
def _omitting_assertions(graph: fx.GraphModule, positions: Collection[int]) -> Iterator[None]:
    """Leaves out the assertions on some inputs, each of which takes as long as a small kernel."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    kind: Any = PythonWrapperCodegen
    add_all = kind.codegen_input_size_asserts

    def add(wrapper: Any) -> None:
        add_all(wrapper)
        # Torch 2.11 and older have written them by now, and keep them.
        pending = getattr(wrapper, "_pending_input_asserts", {})
        for position in positions:
            pending.pop(holders[position].target, None)

    kind.codegen_input_size_asserts = add
    try:
        yield
    finally:
        kind.codegen_input_size_asserts = add_all


def _keep_output_strides(graph: fx.GraphModule) -> None:
    """Makes inductor return tensors with the strides that they have in the trace.

    It would choose other strides where they make a convolution faster, but the next piece is
    compiled for the strides of the trace.
    """
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    values = [getattr(node, "meta", {}).get("val") for node in output.args[0]]
    output.meta["user_visible_output_idxs"] = [
        i for i, value in enumerate(values) if isinstance(value, Tensor)
    ]
    output.meta["original_output_strides"] = [
        value.stride() if isinstance(value, Tensor) else None for value in values
    ]


# Programs of the CPU on disk. They are looked up without inductor: importing it takes seconds.

# Inductor's wrapper of a compiled program; programs with another wrapper are not stored.
_WRAPPER = """
def g(args):
    input_tensors = [arg if isinstance(arg, torch.Tensor) else torch.tensor(arg, device='cpu') \
for arg in args]
    input_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(input_tensors)
    args.clear()
    del input_tensors
    output_handles = f(input_handles)
    output_tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(output_handles)
    return output_tensors
"""
_ENTRY = "inductor_entry_cpp"


class LibraryProgram:
    """A compiled program of the CPU: the entry point of a shared library.

    A call does what inductor's wrapper does, but checks no argument if all are tensors.

    Attributes:
        path: the library.
    """

    __slots__ = ("_entry", "_handles_of", "_tensors_of", "path")

    def __init__(self, path: Path, entry: Callable[[Any], Any]) -> None:
        self.path, self._entry = path, entry
        self._handles_of: Any = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
        self._tensors_of: Any = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        try:
            handles = self._handles_of(args)
        except TypeError:  # sizes are among them
            handles = self._handles_of(
                [
                    arg if isinstance(arg, Tensor) else torch.tensor(arg, device="cpu")
                    for arg in args
                ]
            )
        args.clear()
        found: Sequence[Any] = self._tensors_of(self._entry(handles))
        return found


def library_program(program: Program) -> LibraryProgram | None:
    """Returns the library of a compiled program; ``None`` if the program has other parts."""
    try:
        wrapper = [line.strip() for line in inspect.getsource(program).splitlines()]
        if list(filter(None, wrapper)) != [line.strip() for line in _WRAPPER.split("\n")[1:-1]]:
            return None
        entry = inspect.getclosurevars(program).nonlocals["f"]
        path = Path(entry.__self__.__file__)
    except (OSError, TypeError, KeyError, AttributeError):
        return None
    is_library = entry.__name__ == _ENTRY and path.suffix == ".so"
    return LibraryProgram(path, entry) if is_library else None


def program_of_library(path: Path, name: str) -> LibraryProgram:
    """Loads a compiled program, to be called with a list of inputs.

    Raises:
        ImportError: it cannot be loaded.
    """
    pointer = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(pointer)
    spec = spec_from_file_location(f"{name}.{path.stem}.{_ENTRY}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return LibraryProgram(path, getattr(module, _ENTRY))


def cache_folder() -> Path | None:
    """Returns inductor's cache folder; ``None`` if its caches are disabled."""
    import torch._inductor.config as config

    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    return _inductor_folder()


def _inductor_folder() -> Path:
    """Returns the folder that inductor compiles into, loads code from, and keeps caches in.

    It is replaced by a new one if other users can change it: by default, its name in the folder
    for temporary files is known to all.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(os.environ.get(_FOLDER_VARIABLE) or default_cache_dir()).absolute()
    try:
        return private_folder(folder, create=True)
    except OSError as error:
        made = Path(tempfile.mkdtemp(prefix="mirror-inductor-"))
        os.environ[_FOLDER_VARIABLE] = str(made)
        _log.warning("steps are compiled into the new folder %s, not kept: %s", made, error)
        return made


def compiler_settings() -> str:
    """Returns all settings of inductor."""
    import torch._inductor.config as config

    return repr(sorted(config.get_config_copy().items()))
