"""The numbers of the page about layouts inside a stage are those that are counted."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.parallel.traffic import LayerSizes

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "inside-a-stage.md").read_text()
SAMPLES, LENGTH, WIDTH, HEADS = 16, 64, 128, 4
TOKENS = SAMPLES * LENGTH
FEW_SAMPLES = 8  # per block of samples of the grids, two

# Degrees, options of `parallelize`, kind of context parallelism.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any] | None, str | None]] = {
    "one rank": ({"tp": 1}, None, None),
    "1d": ({"tp": 2}, {}, None),
    "1d, sequence": ({"tp": 2}, {"sequence": True}, None),
    "2d": ({"tp": 4}, {"layout": "2d"}, None),
    "2.5d": ({"tp": 8}, {"layout": "2.5d", "depth": 2}, None),
    "3d": ({"tp": 8}, {"layout": "3d"}, None),
    "ring": ({"cp": 2}, None, "ring"),
    "ring self-attention": ({"cp": 2}, None, "ring-self-attention"),
    "Ulysses": ({"cp": 2}, None, "ulysses"),
}


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables of a section."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [row for row in found if row[0] != "layout" and not row[0].startswith("---")]


def measured(
    layout: str,
    layers: int,
    *,
    recompute: str = "none",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    samples: int = SAMPLES,
):
    """Bytes by axis of a forward, and of a step beyond it; and the peak of activations of one step.

    The bytes are those of a model in float32; of others no forward runs alone.
    """
    degrees, options, context = LAYOUTS[layout]
    sizes = {"vocabulary_size": 64, "layers": layers, "width": WIDTH, "heads": HEADS, "sequence_length": LENGTH}
    x = torch.randint(0, 64, (samples, LENGTH), generator=torch.Generator().manual_seed(1))
    schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=1)

    def work() -> tuple[Counter[str], Counter[str], int]:
        with pl.Mesh(**degrees) as mesh:
            model = GPT(GPTConfig(**sizes, tie_embeddings=False, positions="learned", dropout=dropout))
            init_parameters(model, seed=1)
            model.to(dtype)
            if options is not None:
                pl.parallelize(model, mesh, **options)
            settings = {"recompute": recompute, "context": context, "slices": [LENGTH] if dropout else None}
            with pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=mesh, **settings) as pipe:
                if dtype is torch.float32:
                    pipe.evaluate(x, x)
                forward = _sent(mesh)
                saved = SavedBytes([*pipe.parameters(), *(b for m in pipe.modules() for b in m.buffers())])
                with saved.counting():
                    pipe.step(x, x)
                return forward, _sent(mesh) - forward - forward, saved.peak

    return pl.run_threads(math.prod(degrees.values()), work)


def _sent(mesh: pl.Mesh) -> Counter[str]:
    found: Counter[str] = Counter()
    for (axis, _), traffic in mesh.meter.traffic.items():
        found[axis] += traffic.num_bytes
    return found


@cache
def bytes_per_layer(layout: str) -> dict[str, tuple[int, int]]:
    """By axis, forward and backward; without norms and without the sums of gradients at the end of a step."""
    ranks, fewer = measured(layout, 2), measured(layout, 1)
    found = {}
    for axis in {*ranks[0][0], *ranks[0][1]}:
        each = {
            tuple(own[kind][axis] - less[kind][axis] for kind in (0, 1)) for own, less in zip(ranks, fewer, strict=True)
        }
        assert len(each) == 1, "all ranks send the same"
        found[axis] = each.pop()
    return found


def _besides(layout: str, axis: str) -> tuple[int, int]:
    """What the page says is not in its table: norms, and sums of gradients of norm gains [width]; and flags."""
    batch = {"2d": 2, "2.5d": 4, "3d": 4}.get(layout)  # blocks of the samples
    if layout == "1d, sequence":
        return 0, 2 * (WIDTH + 1) * 4  # two norms, 2 (t-1)/t = 1
    if batch is None:
        return 0, 0
    norms = 32 * TOKENS // batch // 2 if axis == {"3d": "tp_k"}.get(layout, "tp_column") else 0
    gains = 2 * (WIDTH // 2 + 1) * 4 if layout == "2d" and axis == "tp_row" else 0
    return norms, norms + gains


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
def test_the_table_of_bytes(layout: str) -> None:
    table: dict[str, dict[str, tuple[int, int]]] = {}
    name = ""
    for row in rows("Bytes"):
        name = row[0] or name
        forward, backward = (int(cell.replace(",", "")) for cell in row[5:])
        table.setdefault(name, {})[row[4].strip("`")] = forward, backward
    assert set(table) == set(LAYOUTS) - {"one rank"}
    found = bytes_per_layer(layout)
    for axis, wanted in table[layout].items():
        besides = _besides(layout, axis)
        assert tuple(a - b for a, b in zip(found[axis], besides, strict=True)) == wanted, axis
    if layout == "2.5d":
        assert found["tp_depth"] == (0, 12 * 4 * WIDTH**2 // 4 + 4 * 4), "the weights, and one flag for each"


def evaluated(formula: str, **sizes: int) -> float:
    """A formula of the page, whose factors stand beside each other."""
    for mark, power in (("²", "**2"), ("³", "**3")):
        formula = formula.replace(mark, power)
    formula = re.sub(r"(?<=[0-9a-zA-Z)])\s*(?=[a-zA-Z(])", "*", formula)
    return float(eval(formula, {"__builtins__": {}}, sizes))


def test_examples_are_values_of_the_formulae() -> None:
    ranks = {"t": 2, "q": 2, "d": 2, "l": 2, "c": 2}
    for row in rows("Bytes"):
        for formula, example in ((row[2], row[5]), (row[3], row[6])):
            wanted = int(example.replace(",", ""))
            assert evaluated(formula, **ranks, e=4, T=TOKENS, h=WIDTH) == wanted, row
    for layout, _, formula, example in rows("Activation memory"):
        assert evaluated(formula, **ranks, a=2, s=1, h=1) == float(example), (layout, formula)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_formulae_of_bytes_hold_for_other_degrees(n: int) -> None:
    heads, width, samples, tokens = 2 * n, 16 * n**2, n**2, 8 * n
    sizes = LayerSizes(
        samples=samples,
        sequence_length=tokens,
        width=width,
        heads=heads,
        key_heads=heads,
        head_width=width // heads,
        mlp_width=4 * width,
        vocabulary_size=64,
        element=4,
    )
    letters = dict.fromkeys("tqdlc", n) | {"T": samples * tokens, "h": width, "e": 4}
    layouts = {
        "1d": InsideStage(tensor=n),
        "1d, sequence": InsideStage(tensor=n, sequence=True),
        "2d": InsideStage(tensor=n**2, layout="2d"),
        "2.5d": InsideStage(tensor=n**3, layout="2.5d", depth=n),
        "3d": InsideStage(tensor=n**3, layout="3d"),
        "ring": InsideStage(context=n),
        "ring self-attention": InsideStage(context=n, context_kind="ring-self-attention"),
        "Ulysses": InsideStage(context=n, context_kind="ulysses"),
    }
    name, found = "", {layout: layouts[layout].traffic(sizes).block().by_axis() for layout in layouts}
    for row in rows("Bytes"):
        name, axis = row[0] or name, row[4].strip("`")
        grid = layouts[name].grid
        norms = 0.0
        if grid is not None and axis == grid.outer.width:
            norms = evaluated("32 (q-1)/q T", q=n, T=letters["T"] // grid.batch_blocks)
        for way, formula in enumerate(row[2:4]):
            assert found[name][way].pop(axis) - norms == pytest.approx(evaluated(formula, **letters)), row
    assert not any(found[layout][way] for layout in layouts for way in (0, 1)), "an axis that the table lacks"


def _memory() -> list[tuple[str, str, float, float]]:
    """Layout, recomputation, dropout and bytes of all rows; a second table follows the first."""
    found, dropout, seen = [], 0.1, set()
    for layout, recompute, _, number in rows("Activation memory"):
        if (layout, recompute) in seen:
            dropout = 0.0
        seen.add((layout, recompute))
        found.append((layout, recompute, dropout, float(number)))
    return found


@pytest.mark.parametrize(
    ("layout", "recompute", "dropout", "wanted"),  # every other row, some of each layout; all in whole grids
    [pytest.param(*row, marks=pytest.mark.whole_grid if turn % 2 else ()) for turn, row in enumerate(_memory())],
)
def test_the_tables_of_activation_memory(layout: str, recompute: str, dropout: float, wanted: float) -> None:
    """Per token: fewer samples keep as much."""
    settings = {"recompute": recompute, "dropout": dropout, "dtype": torch.bfloat16, "samples": FEW_SAMPLES}
    more, fewer = (measured(layout, layers, **settings) for layers in (2, 1))
    for (*_, peak), (*_, less) in zip(more, fewer, strict=True):
        assert (peak - less) / (FEW_SAMPLES * LENGTH * WIDTH) == pytest.approx(wanted, rel=0.02)


def test_the_tables_are_of_the_sizes_that_are_measured() -> None:
    assert f"`T = {TOKENS}`, `h = {WIDTH}` and `e = 4`" in PAGE
    assert HEADS * LENGTH / WIDTH == 2
    assert "`a s / h = 2`" in PAGE
