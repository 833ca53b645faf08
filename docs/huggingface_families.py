"""Generates the page of transformers' families from what a walk over all of them measured.

python docs/huggingface_families.py              writes the page from the committed JSON file
python docs/huggingface_families.py --measure    walks over all families first (an hour on one core)
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

HEAD = """\
# Hugging Face families

Every family of transformers {version} whose configuration has a pipeline plan (`base_model_pp_plan`), as a tiny random
model in float64: its causal language model, or its base model where there is none. Each runs as a pipeline of 2 and 3
ranks under `1f1b`, `interleaved`, `zb-h1` and `zb-v`, with padding and uneven micro-batches. Loss and gradients are
compared with the model's own accumulation over the same micro-batches in one process. The difference is relative to the
largest value of each gradient.

{works} of {families} families work; the bound is {bound:.0e}. Where fewer runs were measured, the table names them.

Every stage runs the model's own forward, so heads (sequence and token classification, question answering), masks,
rotary tables, soft-capping and losses of routers are the model's. For a family without a plan, declare the order of its
modules: [Models of Hugging Face](../how-to/huggingface.md). Tensor and expert parallelism depend on the plans for these
axes; see [Tensor parallelism](../how-to/tensor-parallel.md).

| family | model | pipeline | largest difference |
|---|---|---|---|
"""


def page(data: dict[str, Any]) -> str:
    """The text of the page."""
    rows = data["families"]
    works = sum(_works(row) for row in rows)
    head = HEAD.format(version=data["transformers"], works=works, families=len(rows), bound=BOUND)
    return head + "".join(map(_row, rows))


def _works(row: dict[str, Any]) -> bool:
    return isinstance(row["pp"], float) and row["pp"] <= BOUND


def _row(row: dict[str, Any]) -> str:
    if not isinstance(row["pp"], float):
        return f"| `{row['family']}` | {row.get('model', '')} | no: {row['pp']} | |\n"
    runs = (
        "" if len(row["runs"]) == 8 else " (" + ", ".join(f"{ranks} ranks {name}" for ranks, name in row["runs"]) + ")"
    )
    difference = "0" if row["pp"] == 0 else f"{row['pp']:.0e}"
    return f"| `{row['family']}` | {row['model']} | {'works' if _works(row) else 'differs'}{runs} | {difference} |\n"


def measure() -> dict[str, Any]:
    """Walk over all families; a family that cannot be measured has the reason in place of the difference."""
    import torch
    import transformers
    from tests.cpu import huggingface_families as walk

    torch.set_num_threads(1)
    rows = []
    for kind in walk.families():
        row: dict[str, Any] = {"family": kind}
        rows.append(row)
        if kind in walk.reason_without():
            row["pp"] = walk.reason_without()[kind]
            continue
        model, inputs = walk.small_model(kind), walk.batch(7)
        expected = walk.reference(model, inputs)
        row["model"] = type(model).__name__
        row["runs"] = [(ranks, name) for ranks in (2, 3) for name in walk.SCHEDULES]
        row["pp"] = max(walk.difference(model, inputs, expected, *run) for run in row["runs"])
        print(kind, row["pp"], flush=True)
    return {"transformers": transformers.__version__, "families": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="walk over all families first")
    if parser.parse_args().measure:
        sys.path.insert(0, str(ROOT))
        DATA.write_text(json.dumps(measure(), indent=1) + "\n")
    PAGE.write_text(page(json.loads(DATA.read_text())))


if __name__ == "__main__":
    main()
