"""Trains programs over public libraries on 3 replicas and plainly: make third-party.

Writes docs/third-party.md. Each library runs in a process of its own.
"""

import argparse
import faulthandler
import importlib
import importlib.metadata
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "third-party.md"
FILES = ("vision", "text", "science", "optimizers", "frameworks")
SECONDS_PER_CASE = 240
HEAD = """# Third-party code seen to work

Each program trains a model from a public library that nobody here wrote, in plain PyTorch and on
3 simulated devices, with batches of 7, 5, 8 and 2 examples, twice over: none divides by 3, and the
last leaves a replica without an example. Way 1 is the unchanged loop, way 3 the whole step in
`run`. Batch normalisation is converted with `mirror.nn.convert_sync_batchnorm`; where a library
wrote its own it is in eval mode in both. Dropout is off. Everything is float64 unless said.

- *difference*: the largest of all losses (relative), and of all parameters and buffers after the
  last step (against how far the tensor moved in training). Right is below 1e-6, in float32 1e-2.
- *ratio*: processor time of mirrored steps over plain ones, on one CPU, where 3 replicas can only
  cost: small models are all overhead.

`make third-party` writes this page; `tests/scripts/third_party/` holds the programs and pins.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="libraries, separated by commas; prints and writes nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in FILES:
        importlib.import_module(f"tests.scripts.third_party.{name}")
    if args.child:
        _train_all_of(args.child)
        return
    from tests.scripts.third_party.program import CASES

    chosen = args.only.split(",") if args.only else sorted(CASES, key=str.lower)
    rows = [row for library in chosen for row in _rows(library)]
    if args.only is None:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(HEAD + _table(rows))
    wrong = [row for row in rows if row["verdict"] not in ("right", "refused", "not run")]
    print(f"{len(rows)} rows, {len(wrong)} wrong")


def _rows(library: str) -> list[dict]:
    command = [sys.executable, "-m", "tests.scripts.third_party", "--child", library]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    rows = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("ROW: ")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1][:160]
        remark = f"exit code {done.returncode}: {last}"
        rows.append(
            {"library": library, "name": "?", "way": 0, "verdict": "ERROR", "remark": remark}
        )
        print(done.stderr[-3000:], flush=True)
    for row in rows:
        print(_line(row), flush=True)
    return rows


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


def _table(rows: list[dict]) -> str:
    lines = [
        "| library | version | what was trained | way | difference | ratio | verdict | remark |",
        "|---|---|---|---|---|---|---|---|",
        *map(_line, rows),
    ]
    right = [row for row in rows if row["verdict"] == "right"]
    libraries = {row["library"] for row in right}
    total = f"{len(right)} of {len(rows)} rows are right, of {len(libraries)} libraries.\n\n"
    return total + "\n".join(lines) + "\n"


def _line(row: dict) -> str:
    library = row["library"]
    difference, ratio = row.get("difference"), row.get("ratio")
    cells = [
        library,
        _version(library),
        row["name"],
        str(row["way"]),
        "" if difference is None else f"{difference:.0e}",
        "" if ratio is None else f"{ratio:.1f}",
        row["verdict"],
        row["remark"],
    ]
    return "| " + " | ".join(cells) + " |"


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "?"


if __name__ == "__main__":
    main()
