"""Generates the page of transformers' families from what a walk over all of them measured.

python docs/huggingface_families.py                      writes the page from the committed JSON file
python docs/huggingface_families.py --measure tp ep      measures columns first: pp (8 CPU minutes), tp, ep, kinds
python docs/huggingface_families.py --measure pp --only llama,qwen3
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "reference" / "huggingface-families.json"
PAGE = DATA.with_suffix(".md")
BOUND = 1e-12  # relative, in float64
COLUMNS = ("pp", "tp", "ep", "kinds")

HEAD = """\
# Hugging Face families

Every family of transformers {version} whose configuration has a pipeline plan (`base_model_pp_plan`), as a tiny random
model in float64: its causal language model, or its base model where there is none. Loss and gradients are compared with
the model's own accumulation over the same micro-batches in one process. The table has the largest difference, relative
to the largest value of each gradient. A column works up to {bound:.0e}, or up to 4 times what the last digit of the
weights changes in the gradients of the model itself, where that is more.

* **pp**: a pipeline of 2 and 3 ranks under `1f1b`, `interleaved`, `zb-h1` and `zb-v`, with padding and uneven
  micro-batches. Stages run the model's own forward, so heads, masks, rotary tables, soft-capping and losses of routers
  are the model's. {pp} work. Where fewer runs were measured, the table names them.
* **tp2**: `pl.parallelize(model, mesh)` on 2 processes by the family's `base_model_tp_plan`, and stages of `zb-v`.
  {tp} work.
* **ep2**: the same by `base_model_ep_plan`: 2 replicas share the experts. {ep} work.

A dash: the family has no such plan.

| family | model | pp | tp2 | ep2 |
|---|---|---|---|---|
"""
KINDS = """\

## Families without a plan

Models of transformers without a pipeline plan are cut as found in their source: lists of blocks, in turn where one loop
runs several, and the modules around them in the order in which the forward names them. Stages run the model's own
forward; one that runs modules otherwise is refused in the first step. A model whose layers share parameters, such as
ALBERT, is traced with `example=`.
Pipelines of 2 ranks (`1f1b`, `zb-h1`) and of 3 (`zb-h1`), compared as above.

| kind | model | pp |
|---|---|---|
"""


def page(data: dict[str, Any]) -> str:
    """The text of the page."""
    rows = data["families"]
    counts = {
        axis: f"{sum(_works(row, axis) for row in rows)} of {sum(axis in row for row in rows)}" for axis in COLUMNS
    }
    head = HEAD.format(version=data["transformers"], bound=BOUND, **counts)
    return head + "".join(map(_row, rows)) + KINDS + "".join(map(_kind, data.get("kinds", ())))


def _works(row: dict[str, Any], axis: str) -> bool:
    found = row.get(axis)
    return isinstance(found, float) and found <= max(BOUND, 4 * row.get("rounding", 0.0))


def _cell(row: dict[str, Any], axis: str) -> str:
    found = row.get(axis)
    if not isinstance(found, float):
        return "-" if found is None else f"no: {found}"
    return f"{'' if _works(row, axis) else 'differs: '}{f'{found:.0e}' if found else '0'}"


def _row(row: dict[str, Any]) -> str:
    runs = row.get("runs", ())
    few = "" if len(runs) in (0, 8) else " (" + ", ".join(f"{ranks} ranks {name}" for ranks, name in runs) + ")"
    cells = f"{_cell(row, 'pp')}{few} | {_cell(row, 'tp')} | {_cell(row, 'ep')}"
    return f"| `{row['family']}` | {row.get('model', '')} | {cells} |\n"


def _kind(row: dict[str, Any]) -> str:
    return f"| {row['kind']} | `{row['model']}` | {_cell(row, 'pp')} |\n"


def measure(data: dict[str, Any], columns: list[str], only: list[str]) -> None:
    """Fill columns of the table; a family that cannot be measured has the reason in place of the difference."""
    import torch
    import transformers
    from tests.cpu import huggingface_axes, huggingface_kinds
    from tests.cpu import huggingface_families as walk

    from pipeloom.errors import PipeloomError

    torch.set_num_threads(1)
    data["transformers"] = transformers.__version__
    known = {row["family"]: row for row in data["families"]}
    data["families"] = rows = [known.get(kind, {"family": kind}) for kind in walk.families()]
    for row in rows:
        kind = row["family"]
        for axis in columns:
            if axis == "kinds" or (only and kind not in only):
                continue
            if axis != "pp" and kind not in huggingface_axes.families_with(axis):
                continue
            try:
                row[axis] = _measured(walk, huggingface_axes, row, axis)
            except PipeloomError as error:
                row[axis] = str(error)
            print(kind, axis, row[axis], flush=True)
            DATA.write_text(json.dumps(data, indent=1) + "\n")
    if "kinds" in columns:
        data["kinds"] = []
        for kind, found in huggingface_kinds.KINDS.items():
            data["kinds"].append({"kind": kind, "model": found.model, "pp": huggingface_kinds.difference(kind)})
            print(data["kinds"][-1], flush=True)


def _measured(walk: Any, axes: Any, row: dict[str, Any], axis: str) -> float | str:
    kind = row["family"]
    if kind in walk.reason_without():
        reason: str = walk.reason_without()[kind]
        return reason
    model = walk.small_model(kind)
    row["model"] = type(model).__name__
    if axis == "pp":
        inputs = walk.batch(7)
        expected = walk.reference(model, inputs)
        row["runs"] = [(ranks, name) for ranks in (2, 3) for name in walk.SCHEDULES]
        return float(max(walk.difference(model, inputs, expected, *run) for run in row["runs"]))
    found = float(axes.axis_difference(model, axis))
    if found > BOUND:
        row["rounding"] = axes.rounding(model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="+", choices=COLUMNS, default=[], help="columns to measure first")
    parser.add_argument("--only", default="", help="families, with commas between them")
    arguments = parser.parse_args()
    data = json.loads(DATA.read_text())
    if arguments.measure:
        sys.path.insert(0, str(ROOT))
        measure(data, arguments.measure, arguments.only.split(",") if arguments.only else [])
        DATA.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(page(data))


if __name__ == "__main__":
    main()
