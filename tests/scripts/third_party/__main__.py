"""Trains programs over public libraries on 3 replicas and plainly: make third-party.

Writes build/third-party.md. Each library runs in a process of its own, one after the other. The
rows of finished libraries are kept in .third-party.json, and a later run continues with the rest;
``--again`` starts over, as is needed after a change of mirror.
"""

import argparse
import faulthandler
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch

from tests.scripts.third_party import page
from tests.scripts.third_party.program import CASES, rows_of, silent
from tests.scripts.third_party.torchvision_shim import define_operators

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "build" / "third-party.md"
KEPT = ROOT / ".third-party.json"
FILES = ("vision", "text", "science", "optimizers", "frameworks")
SECONDS_PER_CASE = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="libraries, separated by commas; prints and writes nothing")
    parser.add_argument("--again", action="store_true", help="start over")
    args = parser.parse_args()
    for name in FILES:
        importlib.import_module(f"tests.scripts.third_party.{name}")
    if args.only:
        for library in args.only.split(","):
            for row in _rows(library):
                print(page.line(row), flush=True)
        return
    TABLE.parent.mkdir(exist_ok=True)
    seen = json.loads(KEPT.read_text()) if KEPT.exists() and not args.again else {}
    for library in sorted(CASES, key=str.lower):
        if library not in seen:
            seen[library] = list(_rows(library))
            print(*map(page.line, seen[library]), sep="\n", flush=True)
            KEPT.write_text(json.dumps(seen, indent=1))
            TABLE.write_text(page.text(seen, ROOT))
    TABLE.write_text(page.text(seen, ROOT))


def _rows(library: str) -> Iterator[dict]:
    """Trains a library's programs in a fork of this process, and yields their rows."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.dup2(errors.fileno(), 2)
            _train_all_of(library, writing)
        os.close(writing)
        with open(reading) as lines:
            yield from map(json.loads, lines)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            errors.seek(0)
            text = errors.read()
            print(text[-3000:], file=sys.stderr, flush=True)
            last = (text.strip().splitlines() or [""])[-1][:160]
            remark = f"exit code {status}: {last}"
            yield {"library": library, "name": "?", "way": 0, "verdict": "ERROR", "remark": remark}


def _train_all_of(library: str, writing: int) -> NoReturn:
    status = 1
    try:
        silent()
        torch.set_num_threads(1)
        define_operators()
        with open(writing, "w") as out:
            for case in CASES[library]:
                faulthandler.dump_traceback_later(SECONDS_PER_CASE * len(case.ways), exit=True)
                for row in rows_of(case):
                    print(json.dumps(asdict(row)), file=out, flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
