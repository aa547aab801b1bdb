"""Trains programs over public libraries on 3 replicas and plainly: make third-party.

Writes docs/third-party.md. Each library runs in a process of its own, one after the other; what
is seen is kept in .third-party.json after every row, so a run that was ended goes on there.
"""

import argparse
import faulthandler
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.scripts.third_party import page
from tests.scripts.third_party.results import Results

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "third-party.md"
KEPT = ROOT / ".third-party.json"
FILES = ("vision", "text", "science", "optimizers", "frameworks")
SECONDS_PER_CASE = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="libraries, separated by commas; prints and writes nothing")
    parser.add_argument("--again", action="store_true", help="keep nothing of an earlier run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in FILES:
        importlib.import_module(f"tests.scripts.third_party.{name}")
    if args.child:
        _train_all_of(args.child)
        return
    from tests.scripts.third_party.program import CASES

    if args.only:
        for library in args.only.split(","):
            for row in _rows(library):
                print(page.line(row), flush=True)
        return
    results = Results(KEPT, ROOT)
    if args.again:
        results.forget()
    programs = {
        library: {Path(case.program.__code__.co_filename) for case in CASES[library]}
        for library in sorted(CASES, key=str.lower)
    }
    for library in results.begin(programs):
        for row in _rows(library):
            results.add(library, row)
            print(page.line(row), flush=True)
        results.finish(library)
        TABLE.write_text(page.text(results))
    print(page.total(results.rows()))


def _rows(library: str) -> Iterator[dict]:
    command = [sys.executable, "-m", "tests.scripts.third_party", "--child", library]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        for line in child.stdout:
            if line.startswith("ROW: "):
                yield json.loads(line[5:])
        if child.wait():
            errors.seek(0)
            told = errors.read()
            last = (told.strip().splitlines() or [""])[-1][:160]
            remark = f"exit code {child.returncode}: {last}"
            print(told[-3000:], file=sys.stderr, flush=True)
            yield {"library": library, "name": "?", "way": 0, "verdict": "ERROR", "remark": remark}


def _train_all_of(library: str) -> None:
    import torch

    from tests.scripts.third_party.program import CASES, rows_of, silent
    from tests.scripts.third_party.torchvision_shim import define_operators

    silent()
    torch.set_num_threads(1)
    define_operators()
    for case in CASES[library]:
        faulthandler.dump_traceback_later(SECONDS_PER_CASE * len(case.ways), exit=True)
        for row in rows_of(case):
            print("ROW: " + json.dumps(asdict(row)), flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
