"""docs/third-party.md, of what was seen."""

import importlib.metadata
import re
from statistics import median

from tests.scripts.third_party.program import CASES, PAIRS
from tests.scripts.third_party.results import Results

_HEAD = """# Third-party code seen to work

Each program trains a model from a public library that nobody here wrote, in plain PyTorch and on
3 simulated devices, with batches of 7, 5, 8 and 2 examples, twice over: none divides by 3, and the
last leaves a replica without an example. Way 1 is the unchanged loop, way 3 the whole step in
`run`. Batch normalisation is converted with `mirror.nn.convert_sync_batchnorm`; where a library
wrote its own it is in eval mode in both. Dropout is off. Everything is float64 unless said.
What else goes over the whole batch must be converted or avoided by hand, as on several devices
anywhere: `torch_geometric.nn.LayerNorm` without `batch=` is such a layer, and nothing warns.

- *difference*: the largest of all losses (relative), and of all parameters and buffers after the
  last step (against how far the tensor moved in training). *right* is below 1e-6, in float32 1e-2.
- *chaotic*: the difference is larger, but not after one step, and plain training that takes the
  examples of each batch in reverse order is about as far from plain training.
- *refused*: an error says so; nothing wrong is computed. *DIFFERS*, *ERROR*: read the remark.
- *ratio*: processor time of a mirrored step over a plain one: the median, least and greatest of
  {pairs} pairs of steps made in turn on one thread of a CPU, where 3 replicas can only cost, and
  small models are all overhead. {load}

{run}

`make third-party` writes this page from one run, which it continues if it was ended before;
`tests/scripts/third_party/` holds the programs and pins. {total}

"""
# What is known of rows that are not right.
_KNOWN = {
    ("tab-transformer-pytorch", "DIFFERS"): "it computes in float32 inside; with that taken out "
    "the difference is 8e-15",
}
_COLUMNS = "library | version | what was trained | way | difference | ratio | verdict | remark"
_RULE = "---|---|---|---|---|---|---|---"


def text(results: Results) -> str:
    """Returns the page."""
    rows, run = results.rows(), results.run
    loads = [row["load"] for row in rows if row.get("load")]
    busy = f"{min(loads):.1f} to {max(loads):.1f}, on {run['cores']} cores" if loads else ""
    begun, ended = run["begun"], run["ended"].removeprefix(run["begun"][:11])
    commit = f" as of commit {run['commit']}" if run["commit"] else ""
    head = _HEAD.format(
        pairs=PAIRS,
        load=f"The load average was {busy}; above 1, other programs ran\n  beside.",
        run=f"From {begun} to {ended} UTC, on {run['machine']};\n{run['of']['versions']}; "
        f"mirror{commit}.",
        total=total(rows),
    )
    missing = sorted((name for name in CASES if not results.is_whole(name)), key=str.lower)
    told = [f"{name} ({len(CASES[name])} programs)" for name in missing]
    end = f"\nNot run, or not to the end: {', '.join(told)}.\n" if missing else ""
    return head + "\n".join([f"| {_COLUMNS} |", f"|{_RULE}|", *map(line, rows)]) + "\n" + end


def total(rows: list[dict]) -> str:
    """Returns how many rows have which verdict."""
    verdicts = [row["verdict"] for row in rows]
    counts = [f"{verdicts.count(v)} {v}" for v in sorted(set(verdicts), key=str.lower)]
    libraries = {row["library"] for row in rows}
    return f"{len(rows)} rows of {len(libraries)} libraries: {', '.join(counts)}."


def line(row: dict) -> str:
    """Returns a row of the table."""
    difference, ratios = row.get("difference"), row.get("ratios")
    spread = f"{median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})" if ratios else ""
    known = _KNOWN.get((row["library"], row["verdict"]), "")
    told = re.sub(r" \(/[^)]*\)?", "", row["remark"])  # paths of the machine
    remark = "; ".join(filter(None, (known, told)))
    cells = [
        row["library"],
        _version(row["library"]),
        row["name"],
        str(row["way"]),
        "" if difference is None else f"{difference:.0e}",
        spread,
        row["verdict"],
        remark,
    ]
    return "| " + " | ".join(cells) + " |"


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "?"
