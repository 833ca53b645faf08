"""What a run report shows of experts: load as heat maps; dropped tokens, entropy and auxiliary losses as curves.

A step of ``metrics.jsonl`` has them by layer:

    "experts": {"blocks.1.experts": {"load": [0.9, 1.1], "dropped": 0.01, "entropy": 0.68, "balance_loss": 1.002}}

`load` are the tokens of each expert over their mean, `dropped` is the fraction of assignments over capacity, `entropy`
that of the router's probabilities in nats.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pipeloom.common.quantities import number_text, percent_text
from pipeloom.report.heat_map import heat_map
from pipeloom.report.line_chart import Series, line_chart
from pipeloom.report.run_files import as_number

_MOST_CELLS = 60_000  # of all heat maps together
_TITLES = {
    "dropped": "dropped assignments",
    "entropy": "entropy of the router",
    "untaken": "tokens that no expert takes",
    "z_loss": "z-loss",
}

Layers = Mapping[str, Sequence[tuple[float, Mapping[str, Any]]]]


def expert_layers(steps: Sequence[Mapping[str, Any]]) -> Layers:
    """By layer, the steps that report it and what they say."""
    found: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for row in steps:
        layers = row.get("experts")
        for name, values in layers.items() if isinstance(layers, Mapping) else ():
            if isinstance(values, Mapping):
                found.setdefault(str(name), []).append((float(row["step"]), values))
    return found


def expert_maps(layers: Layers) -> list[dict[str, Any]]:
    """One heat map per layer, with its heading."""
    loads = {name: [(step, _load(values)) for step, values in rows] for name, rows in layers.items()}
    loads = {name: [row for row in rows if row[1]] for name, rows in loads.items()}
    cells = sum(max(len(load) for _, load in rows) for rows in loads.values() if rows)
    columns = max(20, min(160, _MOST_CELLS // max(1, cells)))
    found = []
    for name, rows in loads.items():
        if not rows:
            continue
        experts = max(len(load) for _, load in rows)
        by_expert = [[load[e] if e < len(load) else math.nan for _, load in rows] for e in range(experts)]
        last = max((value for value in rows[-1][1] if math.isfinite(value)), default=math.nan)
        dropped = as_number(layers[name][-1][1].get("dropped"))
        note = f"busiest expert at the end: {number_text(last)} of the mean"
        if math.isfinite(dropped):
            note += f"; {percent_text(dropped)} dropped"
        picture = heat_map(
            f"{name}: load of {experts} experts by step", [s for s, _ in rows], by_expert, columns=columns
        )
        found.append({"title": name, "note": note, "svg": Markup(picture)})
    return found


def expert_curves(layers: Layers) -> list[dict[str, Any]]:
    """Curves of means over layers, and of the layer with the most (of entropy: the least)."""
    charts = []
    found = dict.fromkeys(key for rows in layers.values() for _, values in rows for key in values)
    losses = sorted(str(key) for key in found if str(key).endswith("_loss"))
    for key in dict.fromkeys([*(key for key in _TITLES if not key.endswith("_loss")), *losses]):
        title = _TITLES.get(key, key.replace("_", " "))
        extreme: Callable[..., float] = min if key == "entropy" else max
        by_step: dict[float, list[float]] = {}
        for rows in layers.values():
            for step, values in rows:
                if key in values:
                    by_step.setdefault(step, []).append(as_number(values[key]))
        if not by_step:
            continue
        points = sorted(by_step.items())
        series = [Series(label=title, points=[(step, math.fsum(v) / len(v)) for step, v in points])]
        keys: list[tuple[str, str]] = []
        if len(layers) > 1:
            worst = "lowest layer" if extreme is min else "highest layer"
            series.append(Series(label=worst, points=[(step, _of_finite(extreme, v)) for step, v in points], style="b"))
            keys = [("a", "mean over layers"), ("b", worst)]
        charts.append({"title": title, "legend": keys, "svg": Markup(line_chart(series))})
    return charts


def _load(values: Mapping[str, Any]) -> list[float]:
    """Load over the mean load, whatever unit it was written in."""
    found = values.get("load")
    numbers = [as_number(value) for value in found] if isinstance(found, list) else []
    finite = [value for value in numbers if math.isfinite(value)]
    mean = math.fsum(finite) / len(finite) if finite else 0.0
    return [value / mean if mean else math.nan for value in numbers]


def _of_finite(choose: Any, values: Sequence[float]) -> float:
    return float(choose((value for value in values if math.isfinite(value)), default=math.nan))
