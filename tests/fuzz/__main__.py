"""``python -m tests.fuzz 1000..2000``: runs the programs of seeds, prints those that go wrong.

``--show 17`` prints a program, ``--shrink 17`` the simplest one that goes wrong in the same way.
"""

import argparse
import collections
import faulthandler
import json
import subprocess
import sys
import time

import torch

from tests.fuzz.programs import program
from tests.fuzz.run import Outcome, run_as_worker, run_program
from tests.fuzz.shrink import shrunk
from tests.worker_pool import WorkerPool


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("seeds", nargs="?", default="0..100", help="A..B, B left out; or A")
    parser.add_argument("--show", action="store_true", help="print the programs only")
    parser.add_argument("--shrink", action="store_true", help="reduce what goes wrong")
    parser.add_argument("--quiet", action="store_true", help="no sources, buckets only")
    parser.add_argument("--seconds", type=float, default=60, help="a program hangs after these")
    parser.add_argument("--sharded", action="store_true", help="with sharded optimizer state only")
    parser.add_argument("--compiled", action="store_true", help="programs of compiled steps")
    parser.add_argument("--mode", default="trace", help="of compiled steps")
    parser.add_argument("--workers", action="store_true", help="on two workers")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    first, _, last = options.seeds.partition("..")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    torch.set_num_threads(1)
    if options.show:
        for seed in seeds:
            print(_program(seed, options).source)
    elif options.worker:
        _work(seeds, options)
    else:
        sys.exit(_supervise(seeds, options))


def _work(seeds, options):
    """Runs seeds, one line of JSON each; a hang ends the process with all stacks."""
    pool = WorkerPool(2) if options.workers else None
    for seed in seeds:
        faulthandler.dump_traceback_later(options.seconds, exit=True)
        drawn = _program(seed, options)
        outcome = run_program(drawn) if pool is None else _run_on(pool, seed, options)
        if options.shrink and not outcome.is_right and pool is None:
            faulthandler.cancel_dump_traceback_later()
            drawn, outcome = shrunk(drawn, outcome)
        faulthandler.cancel_dump_traceback_later()
        line = {"seed": seed, "kind": outcome.kind, "bucket": outcome.bucket}
        line |= {"text": outcome.text, "source": drawn.source, "knobs": str(drawn.knobs)}
        print(json.dumps(line), flush=True)


def _fixed(options):
    return {"optimizer state": 1} if options.sharded else None


def _program(seed, options):
    kinds = {"is_compiled": options.compiled, "of_workers": options.workers}
    return program(seed, _fixed(options), mode=options.mode, **kinds)


def _run_on(pool, seed, options):
    """Returns the outcome of the first worker that goes wrong, or else of the first worker."""
    kinds = {"is_compiled": options.compiled, "mode": options.mode}
    outcomes = [
        Outcome("error", "a worker has exited", text) if text else outcome
        for outcome, text in pool.outcomes(run_as_worker, seed, _fixed(options), **kinds)
    ]
    return next((one for one in outcomes if not one.is_right), outcomes[0])


def _supervise(seeds, options):
    """Runs workers until all seeds are done; returns the exit status."""
    counts, buckets = collections.Counter(), collections.defaultdict(list)
    start, seed, started = seeds.start, seeds.start, time.monotonic()
    while start < seeds.stop:
        command = [sys.executable, "-m", "tests.fuzz", f"{start}..{seeds.stop}", "--worker"]
        command += ["--seconds", str(options.seconds)] + ["--shrink"] * options.shrink
        command += ["--sharded"] * options.sharded + ["--workers"] * options.workers
        command += ["--mode", options.mode] + ["--compiled"] * options.compiled
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as worker:
            seed = start
            for line in worker.stdout:
                if not line.startswith("{"):
                    continue
                result = json.loads(line)
                counts[result["kind"]] += 1
                _report(result, buckets, options)
                seed = result["seed"] + 1
            trace = worker.stderr.read()
        if seed < seeds.stop:
            counts["hangs"] += 1
            result = {"seed": seed, "kind": "hangs", "bucket": "hangs", "text": trace[-6000:]}
            _report(
                result | {"source": _program(seed, options).source, "knobs": ""}, buckets, options
            )
            seed += 1
        start = seed
    print(f"{dict(counts)} in {time.monotonic() - started:.0f} s")
    for bucket, found in sorted(buckets.items(), key=lambda item: -len(item[1])):
        print(f"{len(found):5}  {bucket}: {found[:12]}")
    return int(any(kind not in ("same", "refused") for kind in counts))


def _report(result, buckets, options):
    if result["kind"] == "same":
        return
    buckets[f"{result['kind']} | {result['bucket']}"].append(result["seed"])
    if result["kind"] == "refused" or options.quiet:
        return
    print(f"\n{'=' * 30} seed {result['seed']} {result['kind']}: {result['bucket']}")
    print(f"{result['knobs']}\n{result['source']}\n{result['text']}", flush=True)


if __name__ == "__main__":
    main()
