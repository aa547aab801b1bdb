"""Every private name of torch that mirror uses, with a public replacement where there is one.

``torch_names.txt`` lists the names, the purpose of each, and the loss without it. Other files
import them from here, except those of Dynamo (``base/dynamo.py``) and of tracing
(``compiler/torch_internals.py``). If torch lacks a name, the replacement is used, or its use
raises StrategyError; the import of mirror always works.

Some names are private only in form and may be used everywhere: ``torch._foreach_*``,
``Tensor._version`` and ``Tensor._base``, the dicts ``_parameters``, ``_buffers`` and ``_modules``
of modules, the base class ``_BatchNorm``, and ``_saved_*`` and ``_raw_saved_*`` of autograd's
nodes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import operator
import platform
import threading
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ClassMethodDescriptorType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.func import debug_unwrap
from torch.nn.utils import parametrize

from mirror.base.mutex import Mutex
from mirror.errors import StrategyError

Function = Callable[..., Any]
Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

_WRAPS = "_mirror_wraps"  # attribute of a wrapper: owner, name and wrapper of each wrapping
_wrapping = Mutex()

# docs/torch-versions.md has the table; pyproject.toml promises the same range.
OLDEST_TORCH, NEWEST_TORCH = (2, 7), (2, 15)
OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)

TORCH_RANGE = f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}"
PYTHON_RANGE = f"{OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} to {NEWEST_PYTHON[0]}.{NEWEST_PYTHON[1]}"


def range_warnings() -> tuple[str, ...]:
    """Returns a warning for torch and one for Python, if outside the tested range."""
    found = []
    if not OLDEST_TORCH <= _minor(torch.__version__) <= NEWEST_TORCH:
        found.append(_warning(f"torch {torch.__version__}", f"torch {TORCH_RANGE}"))
    if not OLDEST_PYTHON <= _minor(platform.python_version()) <= NEWEST_PYTHON:
        found.append(_warning(f"Python {platform.python_version()}", f"Python {PYTHON_RANGE}"))
    return tuple(found)


def _warning(what: str, seen: str) -> str:
    return (
        f"this is {what}, and mirror was seen to work with {seen} only; run tests/scripts/"
        "smoke.py of the source here before you trust it, or install one of those"
    )


def _minor(version: str) -> tuple[int, int]:
    """Returns (2, 7) for "2.7.0+cu126" and "2.7.0a0+git1234"."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def wrap_once(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> bool:
    """Replaces an attribute of a class or a module by ``wrapper(original)``: once, permanently.

    The wrapper gets a plain function; for a class method, its first argument is ``cls``. The
    result becomes the same kind of method, with the name and docstring of the original. Wrappers
    that other libraries have added since stay. A wrapper is identified by its module and
    qualified name, so it may be a local function; several wrappers may wrap one attribute.

    Returns:
        Whether this call has wrapped the attribute; False if it was wrapped before.

    Raises:
        AttributeError: there is no such attribute.
    """
    return _wrapping.call(_wrap_once, owner, name, wrapper)


def _wrap_once(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> bool:
    key = (owner, name, f"{wrapper.__module__}.{wrapper.__qualname__}")
    known = getattr(_kind_and_function(owner, name)[1], _WRAPS, ())
    if key in known:
        return False
    _wrap(owner, name, wrapper, {_WRAPS: (*known, key)})
    return True


@contextmanager
def wrapping(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> Iterator[None]:
    """Replaces an attribute as ``wrap_once`` does, but only while the block runs.

    The owner's own attribute is put back afterwards, without what others have put around it since.
    """
    original = vars(owner)[name]
    _wrap(owner, name, wrapper, {})
    try:
        yield
    finally:
        setattr(owner, name, original)


def _wrap(
    owner: Any, name: str, wrapper: Callable[[Function], Function], marks: dict[str, Any]
) -> None:
    kind, original = _kind_and_function(owner, name)
    function = wrapper(original)
    own = dict(vars(function))
    functools.update_wrapper(function, original)
    vars(function).update(own, **marks)
    setattr(owner, name, function if kind is None else kind(function))


def plain_apply() -> Function:
    """Returns ``torch.autograd.Function.apply`` as a function of the class and the arguments."""
    return _kind_and_function(torch.autograd.Function, "apply")[1]


def _kind_and_function(owner: Any, name: str) -> tuple[type[Any] | None, Function]:
    """Returns the kind of method of an attribute (``None``: plain), and its plain function.

    A class method written in C, as Function.apply is since torch 2.15, contains no Python
    function.
    """
    found: Any = inspect.getattr_static(owner, name)
    if isinstance(found, (classmethod, staticmethod)):
        return type(found), found.__func__
    if not isinstance(found, ClassMethodDescriptorType):
        return None, found

    @functools.wraps(found)
    def function(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        return found.__get__(None, cls)(*args, **kwargs)

    return classmethod, function


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private name of torch.

    Attributes:
        path: its dotted path; may contain an expression that creates an object.
        gives: its purpose in mirror.
        lost: the features that fail without it.
        instead: its replacement; empty if there is none.
    """

    path: str
    gives: str
    lost: str
    instead: str

    @property
    def is_lacking(self) -> bool:
        """Whether this torch lacks it; imports its module."""
        try:
            _resolve_in_torch(self.path)
        except AttributeError:
            return True
        return False


@functools.cache
def private_names() -> dict[str, PrivateName]:
    """Returns the table, by path."""
    text = Path(__file__).with_name("torch_names.txt").read_text("ascii")
    names = {}
    for paragraph in text.split("\n\n")[1:]:
        path, *lines = paragraph.splitlines()
        row = dict(line.strip().split(": ", 1) for line in lines)
        names[path] = PrivateName(path, row["gives"], row["lost"], row.get("instead", ""))
    return names


def refuse_lacking(name: str) -> None:
    """Raises StrategyError if this torch lacks a name, given by the last part of its path."""
    (known,) = (known for path, known in private_names().items() if path.endswith(f".{name}"))
    if known.is_lacking:
        _refuse(known.path)


def _refuse(path: str) -> NoReturn:
    lost = private_names()[path].lost
    raise StrategyError(
        f"torch {torch.__version__} lacks {path}, without which mirror cannot have {lost}; "
        f"install one of torch {TORCH_RANGE}"
    )


def _resolve_in_torch(path: str) -> Any:
    found: Any = torch
    for i, part in enumerate(parts := path.split(".")[1:]):
        name, bracket, arguments = part.partition("(")
        if inspect.ismodule(found) and not hasattr(found, name):
            with suppress(ImportError):
                importlib.import_module(".".join(["torch", *parts[: i + 1]]))
        found = getattr(found, name)
        if bracket:
            found = found(*literal_eval(f"[{arguments[:-1]}]"))
    return found


def _find(path: str, instead: Any = None) -> Any:
    """Returns the named object, or its replacement, or an object that raises at its first use."""
    try:
        return _resolve_in_torch(path)
    except AttributeError:
        return _Lacking(path) if instead is None else instead


class _Lacking:
    """Raises StrategyError whenever it is used."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self._path)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self._path)


# State of the calling thread

current_graph_task_id: Callable[[], int] = _find("torch._C._current_graph_task_id")
current_autograd_node: Callable[[], Any] = _find("torch._C._current_autograd_node")
queue_callback: Callable[[Callable[[], object]], None] = _find(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
num_function_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack", lambda: 1)
num_dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack")
functions_interpreter: Callable[[], object] = _find("torch._C._functorch.peek_interpreter_stack")
DisableAutocast: Any = _find("torch._C._DisableAutocast")
_is_batched: Callable[[Tensor], bool] = _find("torch._C._functorch.is_batchedtensor")
_is_differentiated: Callable[[Tensor], bool] = _find("torch._C._functorch.is_gradtrackingtensor")
_jit: Any = torch.jit  # untyped
is_jit_tracing: Callable[[], bool] = _jit.is_tracing
compile_context: Callable[[], object] = _find("torch._guards.CompileContext.try_get")
_function_modes: Callable[[], list[Any]] = _find(
    "torch.overrides._get_current_function_mode_stack"
)
_dispatch_modes: Callable[[], list[Any]] = _find(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
)
_DefaultDevice: Any = _find("torch.utils._device.DeviceContext")


def has_modes() -> bool:
    """Whether this thread's operations are seen by a mode, or by the detection of anomalies.

    A default device is no such mode, nor is one that torch's own tools work by.
    """
    if torch.is_anomaly_enabled():
        return True
    if num_function_modes() and not all(isinstance(m, _DefaultDevice) for m in _function_modes()):
        return True
    return num_dispatch_modes() > 0 and not all(m.is_infra_mode() for m in _dispatch_modes())


class _HookStack(threading.local):
    """The ``saved_tensors_hooks`` that each thread has entered since the import of mirror.

    Wraps the two functions of ``torch._C._autograd`` that every ``saved_tensors_hooks`` calls.
    Torch looks them up at each call.
    """

    def __init__(self) -> None:
        self.hooks: list[Hooks] = []

    def install(self) -> None:
        names: Any = torch._C._autograd
        push, pop = names._push_saved_tensors_default_hooks, names._pop_saved_tensors_default_hooks

        def recording_push(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
            push(pack, unpack)
            self.hooks.append((pack, unpack))

        def recording_pop() -> None:
            pop()
            if self.hooks:
                self.hooks.pop()

        names._push_saved_tensors_default_hooks = recording_push
        names._pop_saved_tensors_default_hooks = recording_pop

    def top(self) -> Hooks | None:
        return self.hooks[-1] if self.hooks else None


def _find_top() -> Callable[[], Hooks | None]:
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        return partial(top, False)
    stack = _HookStack()
    stack.install()
    return stack.top


# Returns the calling thread's innermost ``saved_tensors_hooks``, ``None`` if there are none.
# Torch has ``_top_saved_tensors_default_hooks`` since 2.8.
top_saved_tensors_hooks = _find_top()

# Autograd's graph

PASS = "_engine_run_backward"  # of torch.autograd; every backward pass goes through it

# Class names of nodes, as ``grad_fn`` shows them: of a leaf, and of nodes that contain another.
ACCUMULATES = "AccumulateGrad"
HIDES_ANOTHER = frozenset(("CopySlices", "CppFunction"))
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
NODE_HOOK = "_register_hook"  # of Function: is called for each hook of a node
# Of nodes written in Python.
set_sequence_number: Callable[[Any, int], None] = _find("torch._C._FunctionBase._set_sequence_nr")


def transforms_of(tensor: Tensor) -> set[str]:
    """Returns which of torch.func's transforms follow a tensor: "grad" (or jvp), "vmap"."""
    found = set()
    while (inner := debug_unwrap(tensor, recurse=False)) is not tensor:
        if _is_batched(tensor):
            found.add("vmap")
        elif _is_differentiated(tensor):
            found.add("grad")
        tensor = inner
    return found


def arriving_shape(node: Any, number: int) -> tuple[int, ...]:
    """Returns the shape of a gradient that arrives at a node."""
    return tuple(node._input_metadata[number].shape)


# Tensors

WithoutSubclass: Any = _find("torch._C.DisableTorchFunctionSubclass")
_counted = itertools.count()
_use_count: Callable[[Any], int] = _find(
    "torch._C._storage_Use_Count", lambda storage: next(_counted)
)
num_holders: Callable[[Tensor], int] = _find(
    "torch.Tensor._use_count", lambda tensor: next(_counted)
)
hooks_of: Callable[[Any], Any] = operator.attrgetter("_backward_hooks")
post_accumulate_hooks_of: Callable[[Any], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
# The code of nn.Parameter(parameter), which weight_norm calls.
NEW_PARAMETER: Any = nn.Parameter.__new__.__code__


def storage_key(tensor: Tensor) -> int:
    """Returns a number that tensors share if they share a storage, fake ones as well."""
    key: int = tensor.untyped_storage()._cdata
    return key


def num_sharers(tensors: Iterable[Tensor]) -> list[int]:
    """Returns the number of other holders of each tensor's storage."""
    alone = _use_count_alone()
    return [_use_count(storage_key(tensor)) - alone for tensor in tensors]


@functools.cache
def _use_count_alone() -> int:
    """Returns the use count of an unshared storage; newer versions of torch count one handle."""
    tensor = torch.empty(1, device="cpu")
    return _use_count(storage_key(tensor))


def forget_hooks(parameter: Any) -> None:
    parameter._backward_hooks = None


def has_post_accumulate_hooks(parameter: Any) -> bool:
    return bool(post_accumulate_hooks_of(parameter))


# Modules

SPLIT_CALL = "_compiled_call_impl"  # in a module's __dict__: the function that a call runs
WHOLE_CALL = "_call_impl"
BACKWARD_HOOKS = "_backward_hooks", "_backward_pre_hooks"
MODULE_HOOKS = "_forward_hooks", "_forward_pre_hooks", *BACKWARD_HOOKS


def hooks_of_all_modules() -> list[dict[Any, Any]]:
    """Returns the dicts of the hooks that run in calls of every module."""
    return [getattr(nn.modules.module, f"_global{name}", {}) for name in MODULE_HOOKS]


CONVERT = "_apply"
INFER = "_infer_parameters"
INITIALIZING = "_initialize_hook"  # in a lazy module's __dict__ before its first call
# Lists in a recurrent layer: its weights, and weak references to them.
WEIGHTS, WEIGHT_REFERENCES = WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")
FORWARD_HOOKS = "_forward_pre_hooks", "_forward_hooks"
METADATA = "_metadata"  # of a state_dict: the versions of its modules

# Optimizers

default_store: Callable[[], Any] = _find("torch.distributed.distributed_c10d._get_default_store")
put_hooks_around: Callable[[Function], Function] = _find("torch.optim.Optimizer.profile_hook_step")

# CUDA graphs

_CAPTURE_ENDS = "_cuda_endAllocateToPool", "_cuda_releasePool"


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Has the allocator leave an invalid capture, which torch's own end of it does not do."""
    with suppress(RuntimeError):  # it has left it
        for name in _CAPTURE_ENDS:
            getattr(torch._C, name)(device.index, pool)


# Flags that torch has once per process. A torch that lacks one of these names has no such flag.

_FLAGS = (
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_allow_tf32"),
    *("cudnn_depthwise_kernel", "cublas_allow_tf32", "cublas_allow_fp16_accumulation"),
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    *("cpu_allow_fp16_reduced_precision_reduction", "math_sdp_allow_fp16_bf16_reduction"),
    *("mkldnn_enabled", "mkldnn_deterministic", "onednn_allow_tf32", "nnpack_enabled", "qengine"),
    *("linalg_preferred_backend", "blas_preferred_backend", "sdp_priority_order"),
    *("deterministic_fill_uninitialized_memory", "warnAlways", "float32_matmul_precision"),
)
_ATTENTIONS = ("flash", "math", "mem_efficient", "cudnn", "overrideable", "fa3")
_BACKENDS = ("generic", "cuda", "mkldnn")
_PRECISIONS = tuple(itertools.product(_BACKENDS, ("all", "matmul", "conv", "rnn")))


class ProcessFlag(NamedTuple):
    """A flag of the process.

    Attributes:
        owner: the module, or class, of the function that sets it.
        setter: the name of that function.
        read: returns the arguments with which the setter would change nothing; may raise
            RuntimeError.
        write: the setter.
    """

    owner: Any
    setter: str
    read: Callable[[], tuple[Any, ...]]
    write: Callable[..., object]


@functools.cache
def process_flags() -> tuple[ProcessFlag, ...]:
    """Returns the flags of this torch. Flags that others imply come before these."""
    core, einsum = torch._C, getattr(torch.backends.opt_einsum, "m", torch.backends.opt_einsum)
    names = [
        *((core, f"_set_{name}", f"_get_{name}") for name in _FLAGS),
        *((core, f"_set_sdp_use_{name}", f"_get_{name}_sdp_enabled") for name in _ATTENTIONS),
        (core, "_cuda_set_cudnn_benchmark_limit", "_cuda_get_cudnn_benchmark_limit"),
        *((einsum, f"_set_{name}", f"_get_{name}") for name in ("enabled", "strategy")),
    ]
    found = list[ProcessFlag]()

    def add(owner: Any, setter: str, read: Any, write: Any = None) -> None:
        if read is not None and hasattr(owner, setter):
            # Under a wrapper is the function that sets it.
            write = write or inspect.unwrap(getattr(owner, setter))
            found.append(ProcessFlag(owner, setter, read, write))

    for owner, setter, getter in names:
        get = getattr(owner, getter, None)
        add(owner, setter, None if get is None else partial(_read, get))
    add(core, "_set_default_dtype", partial(_read, torch.get_default_dtype))
    deterministic = inspect.unwrap(core._set_deterministic_algorithms)
    add(
        core,
        "_set_deterministic_algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda mode, warn_only: deterministic(mode, warn_only=warn_only),
    )
    add(
        torch,
        "set_anomaly_enabled",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    )
    precision: Any = getattr(core, "_get_fp32_precision_getter", None)
    for of in _PRECISIONS if precision is not None else ():
        add(core, "_set_fp32_precision_setter", partial(_read_precision, precision, *of))
    return tuple(found)


def _read(getter: Callable[[], Any]) -> tuple[Any, ...]:
    value = getter()
    return value if isinstance(value, tuple) else (value,)


def _read_precision(getter: Callable[..., Any], backend: str, op: str) -> tuple[Any, ...]:
    return backend, op, getter(backend, op)


def read_flags() -> list[tuple[Any, ...] | None]:
    """Returns the values of all flags, for ``write_flags``."""
    return [read_flag(flag) for flag in process_flags()]


def write_flags(values: list[tuple[Any, ...] | None]) -> None:
    """Sets the flags whose values differ from what ``read_flags`` has returned."""
    for flag, value in zip(process_flags(), values, strict=True):
        if value is not None and read_flag(flag) != value:
            flag.write(*value)


def read_flag(flag: ProcessFlag) -> tuple[Any, ...] | None:
    """Returns the value of a flag; ``None`` if torch refuses to tell it."""
    try:
        return flag.read()
    except (RuntimeError, TypeError):  # such a flag is set by a newer function, or is no flag
        return None


_OF_KERNELS = (
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled"),
    *("mkldnn_deterministic", "cublas_allow_fp16_accumulation", "blas_preferred_backend"),
    *("linalg_preferred_backend", "cublas_allow_fp16_reduced_precision_reduction"),
    *("cublas_allow_bf16_reduced_precision_reduction", "math_sdp_allow_fp16_bf16_reduction"),
    *("sdp_priority_order", "deterministic_fill_uninitialized_memory"),
    *(f"{name}_sdp_enabled" for name in _ATTENTIONS),
)


@functools.cache
def kernel_flags() -> tuple[tuple[str, ...], tuple[Callable[[], Any], ...]]:
    """Returns names and getters of the flags by which torch chooses kernels, and their rounding.

    Getters are functions of C: what is read before every call costs no call of Python.
    """
    core = torch._C
    found = {
        name: getter
        for name in _OF_KERNELS
        if (getter := getattr(core, f"_get_{name}", None)) is not None
    }
    precision: Any = getattr(core, "_get_fp32_precision_getter", None)
    if precision is None:  # before torch 2.9
        names = ("cublas_allow_tf32", "cudnn_allow_tf32")
        found |= {name: getattr(core, f"_get_{name}") for name in names}
    else:
        pairs = itertools.product(("cuda", "mkldnn"), ("matmul", "conv"))
        found |= {f"fp32 precision of {b} {op}": partial(precision, b, op) for b, op in pairs}
    return tuple(found), tuple(found.values())


ContextProp: Any = getattr(torch.backends, "ContextProp", None)  # an assignment sets a flag


def read_parametrize_cache() -> tuple[int, dict[Any, Any]]:
    """Returns the cache of parametrized weights, and how many contexts have turned it on."""
    return parametrize._cache_enabled, {**parametrize._cache}


def write_parametrize_cache(value: tuple[int, dict[Any, Any]]) -> None:
    """Sets what ``read_parametrize_cache`` has returned."""
    parametrize._cache_enabled, parametrize._cache = value[0], {**value[1]}
