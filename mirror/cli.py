"""The command line: ``mirror run``, ``check``, ``doctor``, ``demo``, ``plan``, ``bench`` and more.

Each command has a function that adds its parser, and a function that imports its tool and runs it.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mirror import __version__
from mirror.errors import MirrorError
from mirror.tools.option_types import (
    count,
    device_names,
    link,
    number_not_negative,
    positive,
    positive_number,
    seed,
    share,
    tolerance,
    whole,
    worker_range,
)

if TYPE_CHECKING:
    from mirror.tools.run_command import Script

OptionsT = TypeVar("OptionsT")

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as in shells."""

_BENCHMARKS = {
    "all-reduce": ("all_reduce.py", "bandwidth of all-reduce, of every backend that can run here"),
    "overhead": ("overhead.py", "the cost of mirror on one device, where it has no work"),
    "servers": ("servers.py", "calls, pulls, pushes and steps over parameter servers"),
    "train": ("train_step.py", "step times beside plain PyTorch, DDP and DataParallel"),
}
"""The benchmarks: the file of each, and the quantity that it measures."""
_PLAN_ARGUMENTS = (
    *"batch_size parameters tensors forward_share link network devices_per_machine".split(),
    *"max_devices scaling algorithm bucket_bytes wire_dtype optimizer_state".split(),
)
_OPTIONS = {
    "step_seconds": "--step-ms",
    "host_seconds": "--host-ms",
    "update_seconds": "--update-ms",
    "case": "--case",
    "devices": "--devices",
    **{name: f"--{name.replace('_', '-')}" for name in _PLAN_ARGUMENTS},
}
"""The options for Python's keyword arguments, which errors name."""
_DEVICES_HELP = "one replica on each, for example cuda:0,cuda:1; repeat one to simulate: cpu,cpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    Args:
        argv: the arguments after the program's name; ``None`` for the process's arguments.
    """
    args, unknown = _parser().parse_known_args(argv)
    if unknown:  # reported by the command's parser, since its usage lists the options
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return _run(args)
    finally:
        if argv is None:
            # The process ends now: a second Ctrl-C would print a traceback, and change the exit
            # code.
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(args: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        code = command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("mirror: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has exited (mirror demo | head). Buffered output is discarded, so that Python
        # reports no error on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MirrorError as error:
        print(f"mirror: {_name_options(str(error))}", file=sys.stderr)
        return getattr(error, "exit_code", 1)


def _name_options(message: str) -> str:
    """Returns an error's message with options in place of Python's keyword arguments.

    ::

        batch_size must be above 0              --batch-size must be above 0
        scaling='strong' needs batch_size=      --scaling strong needs --batch-size
        pass devices=['cpu'] * 4                pass --devices cpu,cpu,cpu,cpu

    A keyword that is also an English word is replaced only before "=", or before " must" at the
    beginning.
    """

    def repeat(match: re.Match[str]) -> str:
        return "--devices " + ",".join([match[1]] * int(match[2]))

    message = re.sub(r"devices=\['([\w:]+)'\] \* (\d+)", repeat, message)
    message = message.replace("leave devices out", "leave --devices out")
    for name, option in _OPTIONS.items():
        message = re.sub(rf"(?<![-\w]){name}='(\w+)'", rf"{option} \1", message)
        message = re.sub(rf"(?<![-\w]){name}=|^{name}(?= must|:)", option, message)
        if "_" in name:
            message = re.sub(rf"(?<![-\w]){name}\b", option, message)
    return message


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mirror", description="MirroredStrategy for PyTorch: one process, all local GPUs."
    )
    parser.add_argument("--version", action="version", version=f"mirror {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    _add_run(commands)
    _add_elastic(commands)
    _add_check(commands)
    _add_doctor(commands)
    _add_demo(commands)
    _add_plan(commands)
    _add_bench(commands)
    _add_checkpoint(commands)
    _add_serve(commands)
    return parser


def _add_script_command(
    commands: Any, name: str, *, command: Callable[[argparse.Namespace], int], **texts: str
) -> argparse.ArgumentParser:
    """Adds a command that takes a script; what follows the script's name belongs to the script."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        usage=f"mirror {name} [options] SCRIPT [arguments], or mirror {name} [options] -m MODULE "
        "[arguments]",
        allow_abbrev=False,
        **texts,
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="its path, or after -m a module's name")
    arguments = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    arguments.required = False  # some versions of argparse report it as missing
    parser.set_defaults(command=command, parser=parser)
    return parser


def _script_of(args: argparse.Namespace) -> Script:
    from mirror.tools.run_command import Script

    return Script(args.script, tuple(args.arguments), args.is_module)


def _options_of(kind: Callable[..., OptionsT], args: argparse.Namespace) -> OptionsT:
    """Returns a command's options, a dataclass, from the arguments of the same names."""
    return kind(**{name: getattr(args, name) for name in inspect.signature(kind).parameters})


def _add_run(commands: Any) -> None:
    parser = _add_script_command(
        commands,
        "run",
        command=_run_script,
        help="run an unchanged training script on all devices",
        description="Runs a script, or with -m a module, unchanged, with the scope of a strategy "
        "open: its models and optimizers are mirrored. Arguments, exit code, tracebacks and "
        "signals are as under python. Under torchrun the workers follow from the environment.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--devices", type=device_names, metavar="A,B,...", help=_DEVICES_HELP)
    where.add_argument(
        "--replicas",
        type=positive,
        metavar="N",
        help="this many, on the GPUs in turn, or on simulated devices if there is no GPU",
    )
    parser.add_argument(
        "--strategy",
        choices=("one-device", "mirrored", "central-storage", "multi-worker"),
        help="default: mirrored; multi-worker where a launcher has started several processes",
    )
    parser.add_argument(
        "--schedule",
        choices=("auto", "lockstep", "staggered", "parallel"),
        help="how replicas take turns",
    )
    parser.add_argument("--backend", metavar="NAME", help="of communication; see mirror doctor")
    parser.add_argument(
        "--verify",
        choices=("first", "error", "off"),
        help="compare the first split call of each kind with one device, and warn (the default) "
        "or raise an error",
    )
    parser.add_argument("--trace", metavar="FILE", help="write a timeline for ui.perfetto.dev")
    parser.add_argument(
        "--report", action="store_true", help="print at the end where the time of steps went"
    )
    parser.add_argument(
        "--sync-batch-norm",
        action="store_true",
        help="have BatchNorm use the whole batch, as one device does",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="replay the calls of models in training as recorded programs, on GPUs as CUDA "
        "graphs; what cannot be recorded runs as it is, with a warning",
    )


def _run_script(args: argparse.Namespace) -> int:
    from mirror.tools.run_command import RunOptions, run_command

    return run_command(_script_of(args), _options_of(RunOptions, args))


def _add_elastic(commands: Any) -> None:
    parser = _add_script_command(
        commands,
        "elastic",
        command=_run_elastic,
        help="start the workers of an elastic training, and replace lost ones",
        description="Starts a script, or with -m a module, that calls mirror.train.elastic.run, "
        "as several workers. A lost worker is started again; the others go on meanwhile, or wait, "
        "in the same processes. On several machines, one has --port, and the others --join.",
    )
    parser.add_argument(
        "--workers",
        type=worker_range,
        metavar="[MIN:]MAX",
        help="of all machines: training goes on with MIN workers, and takes up to MAX; with one "
        "number it always waits for so many",
    )
    parser.add_argument(
        "--local", type=count, metavar="N", help="workers of this machine; default: MAX, or 1"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--port", type=positive, metavar="PORT", help="for --join elsewhere")
    where.add_argument("--join", metavar="HOST:PORT", help="the machine with --port")
    parser.add_argument(
        "--max-restarts",
        type=count,
        default=3,
        metavar="N",
        help="how many lost workers to start again; default: 3",
    )
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=10.0,
        metavar="SECONDS",
        help="a worker that has been silent for so long is lost; default: 10",
    )


def _run_elastic(args: argparse.Namespace) -> int:
    from mirror.train.elastic.elastic_agent import AgentOptions, ElasticAgent, make_start
    from mirror.train.elastic.membership import MembershipOptions

    if (args.workers is None) != (args.join is not None):
        args.parser.error("needs --workers, or, where the coordinator is elsewhere, --join")
    script = _script_of(args)
    script.check()
    least, most = args.workers or (1, 1)
    is_local = args.port is None and args.join is None
    num_local = args.local if args.local is not None else most if is_local else 1
    options = AgentOptions(
        num_local,
        args.max_restarts,
        MembershipOptions(least, most, timeout_seconds=args.timeout),
        args.join,
        args.port,
    )
    return ElasticAgent(make_start([sys.executable, *script.command()]), options).run()


def _add_check(commands: Any) -> None:
    parser = _add_script_command(
        commands,
        "check",
        command=_check_script,
        help="does a script train on several devices as on one?",
        description="Trains a script on one device and on simulated devices, compares the two "
        "after each optimizer step, and says what differs first, where, why, and what to do. "
        "Exits with 0 if they are equal, 1 if they differ, 2 if they cannot be compared, 3 if the "
        "script is missing, 4 if it fails by itself, 5 if it needs other arguments, 6 if it "
        "trains in processes that it starts, 7 if it takes no optimizer step in time.",
    )
    parser.add_argument(
        "--replicas", type=positive, default=2, metavar="N", help="simulated devices; default: 2"
    )
    parser.add_argument(
        "--devices",
        type=device_names,
        metavar="A,B,...",
        help="real devices instead, such as cuda:0,cuda:0; without it GPUs are hidden",
    )
    parser.add_argument(
        "--steps", type=positive, default=20, metavar="N", help="of all optimizers; default: 20"
    )
    parser.add_argument(
        "--tolerance",
        type=tolerance,
        default="auto",
        metavar="X",
        help="the largest relative difference that counts as rounding; default: auto, measured",
    )
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=600.0,
        metavar="SECONDS",
        help="end a run that takes no optimizer step for so long; default: 600",
    )
    parser.add_argument(
        "--no-dropout", action="store_true", help="set all dropout probabilities to 0 in both runs"
    )
    parser.add_argument(
        "--double", action="store_true", help="make float64 the default dtype in both runs"
    )
    parser.add_argument(
        "--sync-batch-norm",
        action="store_true",
        help="have BatchNorm use the whole batch, as mirror run --sync-batch-norm does",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the result for machines")


def _check_script(args: argparse.Namespace) -> int:
    from mirror.tools.check.check_command import CheckOptions, check_command

    return check_command(_script_of(args), _options_of(CheckOptions, args))


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show devices and backends, and test them",
        description="Shows devices, topology, peer access and libnccl, the available backends, "
        "and why other backends are unavailable; runs a data-integrity test of each available "
        "one. Shows the cluster that torchrun, TF_CONFIG, Slurm or Kubernetes describe. Exits "
        "with 1 if a test fails or the description of the cluster is wrong.",
    )
    parser.add_argument("--devices", type=device_names, metavar="A,B,...", help=_DEVICES_HELP)
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(command=_doctor, parser=parser)


def _doctor(args: argparse.Namespace) -> int:
    from mirror.tools.diagnosis import diagnose

    found = diagnose(args.devices, lambda line: print(line, file=sys.stderr, flush=True))
    print(found.to_json() if args.json else found.to_text())
    return 0 if found.healthy else 1


def _add_bench(commands: Any) -> None:
    rows = "\n".join(f"  {name:12}{what}" for name, (_, what) in _BENCHMARKS.items())
    parser = commands.add_parser(
        "bench",
        help="measure on this machine",
        description="Runs one of the benchmarks, and prints its measurements:\n\n" + rows,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "benchmark", choices=sorted(_BENCHMARKS), metavar="benchmark", help="one of these names"
    )
    options = parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        help="the benchmark's options; 'mirror bench train --help' shows those of train",
    )
    options.required = False  # some versions of argparse report it as missing
    parser.set_defaults(command=_bench, parser=parser)


def _bench(args: argparse.Namespace) -> int:
    script = _find_benchmark(_BENCHMARKS[args.benchmark][0])
    return subprocess.run([sys.executable, script, *args.options]).returncode


def _find_benchmark(name: str) -> str:
    package = Path(__file__).resolve().parent
    folders = (package / "benchmarks", package.parent / "benchmarks")  # of a wheel, of a checkout
    script = next((folder / name for folder in folders if (folder / name).exists()), None)
    if script is None:
        raise MirrorError(
            f"benchmarks/{name} is missing in this installation; install mirror again"
        )
    return str(script)


def _add_checkpoint(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="show or export a checkpoint",
        description="Shows the content of a checkpoint, or of the newest one in a directory; or "
        "writes it as a file that torch.load reads.",
    )
    actions = parser.add_subparsers(metavar="action", required=True)
    show = actions.add_parser("show", help="the step, objects and tensors")
    show.add_argument("path", type=Path, help="of the checkpoint, or of a directory of several")
    show.add_argument("--verify", action="store_true", help="read it all, compare checksums")
    show.set_defaults(command=_show, parser=show)
    export = actions.add_parser("export", help="write a new file for torch.load: states by name")
    export.add_argument("path", type=Path, help="of the checkpoint, or of a directory of several")
    export.add_argument("to", type=Path, help="the new file")
    export.set_defaults(command=_export, parser=export)


def _show(args: argparse.Namespace) -> int:
    from mirror.train.checkpoint.manager import describe_checkpoint

    print(describe_checkpoint(args.path, verify=args.verify))
    return 0


def _export(args: argparse.Namespace) -> int:
    from mirror.train.checkpoint.manager import export_checkpoint

    export_checkpoint(args.path, args.to)
    return 0


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="run a parameter server or a worker for a program on another machine",
        description="Serves programs that have this address in ParameterServerStrategy("
        "cluster=...), one after another, until it is interrupted. All processes need the same "
        "key in MIRROR_ENGINE_KEY, 16 bytes or more in hexadecimal.",
    )
    parser.add_argument(
        "address", nargs="?", metavar="HOST:PORT", help="default: this task's in TF_CONFIG"
    )
    parser.add_argument(
        "--host", help="the address to listen on, if it differs; 0.0.0.0: all networks"
    )
    parser.set_defaults(command=_serve, parser=parser)


def _serve(args: argparse.Namespace) -> int:
    if args.address is None and "TF_CONFIG" not in os.environ:
        args.parser.error("needs HOST:PORT, the address to serve at, or TF_CONFIG with a task")
    # The kernel sends process 1 of a container no signal that it does not handle.
    signal.signal(signal.SIGTERM, _exit_once)
    from mirror.cluster import TFConfigResolver
    from mirror.server import Server

    cluster = TFConfigResolver() if args.address is None else args.address
    with Server(cluster, host=args.host) as server:
        print(f"serving at {server.address}", flush=True)
        server.join()
    return 0


def _exit_once(number: int, frame: object) -> None:
    """Exits with the code of a signal; later signals do not interrupt the exit."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small network on all devices and compare with one device",
        description="Trains a small convolutional network on all GPUs, or on 4 simulated devices "
        "if there is none, then the same network on one plain device, and compares the results.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--devices", type=device_names, metavar="A,B,...", help=_DEVICES_HELP)
    where.add_argument(
        "--replicas",
        type=positive,
        metavar="N",
        help="this many, on the GPUs in turn or all on the CPU",
    )
    parser.add_argument("--epochs", type=positive, metavar="N", help="default: about a minute")
    parser.add_argument(
        "--batch-size", type=positive, default=64, metavar="N", help="of all replicas together"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights and data")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="gzipped IDX files under MNIST's names; default: Fashion-MNIST of the Debian package "
        "dataset-fashion-mnist if it is installed, else scikit-learn's digits, else drawn ones",
    )
    parser.set_defaults(command=_demo, parser=parser)


def _demo(args: argparse.Namespace) -> int:
    from mirror.tools.demo import DemoOptions, run_demo

    run_demo(_options_of(DemoOptions, args))
    return 0


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict a step on 1 to 1,024 devices",
        description="Predicts step time, hidden communication and efficiency on 1 to 1,024 "
        "devices from the step of one device, and shows when one process is no longer enough. "
        "docs/planning.md describes the model, its limits and its errors.",
    )
    step = parser.add_argument_group("the step of a single device")
    step.add_argument("--case", metavar="NAME", help="a published one, such as resnet50-v100")
    step.add_argument("--step-ms", type=positive_number, metavar="MS", help="how long it takes")
    step.add_argument("--batch-size", type=positive, metavar="N", help="its examples")
    step.add_argument("--parameters", type=whole, metavar="N", help="of the model, as in 25.6e6")
    step.add_argument("--tensors", type=positive, metavar="N", help="that these are in")
    step.add_argument(
        "--host-ms", type=number_not_negative, metavar="MS", help="what launching it takes"
    )
    step.add_argument(
        "--update-ms", type=number_not_negative, metavar="MS", help="the optimizer's part of it"
    )
    step.add_argument("--forward-share", type=share, metavar="X", help="of forward and backward")
    more = parser.add_argument_group("the machines")
    more.add_argument("--link", type=link, help="inside: nvlink1 to 5, pcie3 to 5, or GB/S,US")
    more.add_argument("--network", type=link, help="between: 100g, 8x400g, ..., or GB/S,US")
    more.add_argument("--devices-per-machine", type=positive, metavar="N", help="default: 8")
    more.add_argument("--max-devices", type=positive, metavar="N", help="default: 1024")
    more.add_argument("--scaling", choices=("weak", "strong"), help="default: weak")
    more.add_argument("--algorithm", choices=("auto", "ring", "tree", "hierarchical"))
    more.add_argument("--bucket-bytes", type=positive_number, metavar="N", help="default: 25 MiB")
    more.add_argument("--wire-dtype", choices=("float32", "float16", "bfloat16"))
    more.add_argument("--optimizer-state", choices=("replicated", "sharded"))
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--plot", metavar="FILE", help="also draw it: .png, .svg or .pdf")
    parser.add_argument("--links", action="store_true", help="the links, and their sources")
    parser.add_argument("--check", action="store_true", help="errors against published figures")
    parser.set_defaults(command=_plan, parser=parser)


def _plan(args: argparse.Namespace) -> int:
    from mirror.tools.planning.plan import make_plan
    from mirror.tools.planning.prediction import table_of_links

    published = {}
    if args.check or args.case is not None:
        published = runpy.run_path(_find_benchmark("published_figures.py"))
    if args.links or args.check:
        tables = [table_of_links()] * args.links
        tables += [published["table_of_checks"]()] if args.check else []
        print("\n\n".join(tables))
        return 0
    if args.case is None and None in (args.step_ms, args.parameters):
        args.parser.error("needs --case NAME, or both --step-ms MS and --parameters N")
    given = {name: getattr(args, name) for name in _PLAN_ARGUMENTS}
    for name in ("step", "host", "update"):
        milliseconds = getattr(args, f"{name}_ms")
        given[f"{name}_seconds"] = None if milliseconds is None else milliseconds / 1e3
    case = {} if args.case is None else published["arguments_of_case"](args.case)
    found = make_plan(given, case)
    if args.plot:
        found.plot(args.plot)
    print(found.to_json() if args.json else found)
    return 0
