"""The report of a training run: one offline HTML file, made from the files in the output directory of the run."""

from __future__ import annotations

import json
import math
import platform
import statistics
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from pipeloom.common.atomic_file import write_whole
from pipeloom.common.quantities import bytes_text, counted, number_text, plural, seconds_text
from pipeloom.errors import InputError
from pipeloom.report.html import percent_text, render
from pipeloom.report.metrics import Metrics, read_metrics
from pipeloom.report.perfetto import write_trace
from pipeloom.report.plots import Series, line_chart
from pipeloom.report.svg import timeline_svg
from pipeloom.sim.timeline import Timeline

_CHARTS = (
    ("gradient norm", "grad_norm", None),
    ("learning rate", "lr", None),
    ("tokens per second", "tokens_per_second", None),
    ("seconds per step", "step_seconds", None),
    ("bubble", "bubble_fraction", "predicted_bubble_fraction"),
)


def write_report(output_dir: Path) -> Path:
    """Write ``report.html`` and, if the run recorded a timeline, ``timeline.json.gz`` into `output_dir`.

    Reads ``metrics.jsonl`` and, if they exist, ``config.yaml``, ``timelines.json`` (``{"measured": ...,
    "predicted": ...}``, each the JSON of a `Timeline`) and ``environment.json`` (name -> value).

    Returns:
        The path of the report.

    Raises:
        InputError: the directory has no metrics, a file is damaged, or the report cannot be written.
    """
    if not output_dir.is_dir():
        raise InputError(f"{output_dir} is not a directory. Pass the --output_dir of `pipeloom train`.")
    metrics = read_metrics(output_dir / "metrics.jsonl")
    timelines = _read_timelines(output_dir / "timelines.json")
    report = output_dir / "report.html"
    page = _page(output_dir, metrics, timelines)
    try:
        write_whole(report, page)
        if "measured" in timelines:
            write_trace(timelines["measured"], output_dir / "timeline.json.gz")
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}. The report is written to the directory of the run: make it writable "
            "and free space on its disk."
        ) from error
    return report


def _read_timelines(path: Path) -> dict[str, Timeline]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            kind: Timeline.from_json(found[kind] if isinstance(found[kind], str) else json.dumps(found[kind]))
            for kind in ("measured", "predicted")
            if found.get(kind) is not None
        }
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path} has no valid timelines ({error}). Remove it for a report without them.") from error


def _page(output_dir: Path, metrics: Metrics, timelines: dict[str, Timeline]) -> str:
    from markupsafe import Markup

    shown = [timelines[kind] for kind in ("measured", "predicted") if kind in timelines]
    environment, environment_note = _environment(output_dir / "environment.json")
    loss = [Series(label="training loss", points=metrics.series("loss"))]
    if metrics.evaluations:
        loss.append(Series(label="validation loss", points=metrics.series("eval_loss"), style="b", marks=True))
    return render(
        "run.html.j2",
        title=output_dir.resolve().name,
        lead=_lead(metrics, shown),
        warnings=_warnings(metrics),
        tiles=_tiles(metrics),
        evaluated=bool(metrics.evaluations),
        loss_chart=Markup(line_chart(loss, width=1040, height=300)),
        picture=Markup(timeline_svg(shown, titles=[_timeline_title(t) for t in shown])) if shown else "",
        no_picture="This run recorded no timeline: timelines.json is not in its directory.",
        ranks=_ranks(metrics),
        charts=_charts(metrics),
        configuration=_configuration(output_dir / "config.yaml"),
        environment=environment,
        environment_note=environment_note,
    )


def _lead(metrics: Metrics, timelines: list[Timeline]) -> str:
    first, last = metrics.steps[0]["step"], metrics.steps[-1]["step"]
    text = f"Training run, steps {first} to {last}"
    if timelines:
        ranks, microbatches = timelines[0].num_ranks, timelines[0].num_microbatches
        text += f"; schedule {timelines[0].name} on {counted(ranks, 'rank')}, "
        text += f"{counted(microbatches, 'micro-batch')} per step"
    return text


def _timeline_title(timeline: Timeline) -> str:
    kind = "measured" if timeline.kind == "measured" else "predicted"
    return f"{kind}: {seconds_text(timeline.makespan)}, bubble {percent_text(timeline.bubble_fraction)}"


def _warnings(metrics: Metrics) -> list[str]:
    found = []
    skipped = _skipped(metrics)
    for key, name in (("loss", "training loss"), ("eval_loss", "validation loss"), ("grad_norm", "gradient norm")):
        bad = [int(step) for step, value in metrics.series(key) if not math.isfinite(value)]
        if key == "grad_norm":
            bad = [step for step in bad if step not in skipped]
        if bad:
            steps = ", ".join(map(str, bad[:12])) + (f" and {len(bad) - 12} more" if len(bad) > 12 else "")
            found.append(f"The {name} was not finite at {plural('step', len(bad))} {steps} (red crosses below).")
    if metrics.truncated:
        found.append("The last line of metrics.jsonl is incomplete: the run was killed while it wrote the line.")
    return found


def _skipped(metrics: Metrics) -> set[int]:
    """The steps without an optimizer step, because float16 gradients overflowed at their loss scale."""
    count, found = 0.0, set()
    for step, total in metrics.series("skipped_steps"):
        if total > count:
            found.add(int(step))
        count = total
    return found


def _tiles(metrics: Metrics) -> list[dict[str, str]]:
    tiles = []

    def add(label: str, value: str, note: str = "") -> None:
        tiles.append({"label": label, "value": value, "note": note})

    last_step, last_loss = metrics.steps[-1]["step"], metrics.series("loss")
    if last_loss:
        add("training loss", number_text(last_loss[-1][1]), f"at step {last_step}")
    evaluations = metrics.series("eval_loss")
    if evaluations:
        finite = [(value, step) for step, value in evaluations if math.isfinite(value)]
        best = f"best {number_text(min(finite)[0])} at step {min(finite)[1]:.0f}" if finite else ""
        add("validation loss", number_text(evaluations[-1][1]), best)
    for label, key, text in (
        ("tokens per second", "tokens_per_second", number_text),
        ("seconds per step", "step_seconds", seconds_text),
        ("bubble", "bubble_fraction", percent_text),
    ):
        median = _median(metrics, key)
        if median is not None:
            predicted = _median(metrics, "predicted_bubble_fraction") if key == "bubble_fraction" else None
            add(label, text(median), "median" if predicted is None else f"median; predicted {text(predicted)}")
    memory = [value for value in metrics.per_rank("peak_memory_bytes") if math.isfinite(value)]
    if memory:
        add("peak memory", bytes_text(max(memory)), "maximum over processes")
    scales = metrics.series("loss_scale")
    if scales:
        add("loss scale", number_text(scales[-1][1]), f"{counted(len(_skipped(metrics)), 'optimizer step')} skipped")
    return tiles


def _median(metrics: Metrics, key: str) -> float | None:
    values = [value for _, value in metrics.series(key) if math.isfinite(value)]
    return statistics.median(values) if values else None


def _ranks(metrics: Metrics) -> list[dict[str, str]]:
    memory, live = metrics.per_rank("peak_memory_bytes"), metrics.per_rank("live_activations")
    most = max((value for value in memory if math.isfinite(value)), default=0.0)
    count = max(len(memory), len(live))
    ranks = len(live) or count  # ranks per data-parallel replica; memory is listed replica by replica
    memory += [math.nan] * (count - len(memory))
    live = (live or [math.nan]) * -(-count // max(1, len(live)))
    return [
        {
            "name": f"{place}" if count == ranks else f"{place % ranks} of replica {place // ranks}",
            "memory": bytes_text(used) if math.isfinite(used) else "not recorded",
            "share": f"{100 * used / most:.1f}" if most and math.isfinite(used) else "0",
            "live": number_text(alive) if math.isfinite(alive) else "not recorded",
        }
        for place, (used, alive) in enumerate(zip(memory, live, strict=False))
    ]


def _charts(metrics: Metrics) -> list[dict[str, Any]]:
    from markupsafe import Markup

    charts = []
    for title, key, predicted in _CHARTS:
        series = [Series(label=title, points=metrics.series(key))]
        keys = []
        if predicted is not None and metrics.series(predicted):
            series.append(Series(label=f"{title}, predicted", points=metrics.series(predicted), style="b"))
            keys = [("a", "measured"), ("b", "predicted")]
        if series[0].points:
            charts.append({"title": title, "legend": keys, "svg": Markup(line_chart(series))})
    return charts


def _configuration(path: Path) -> str:
    """The text of ``config.yaml``; empty if it does not exist."""
    if not path.exists():
        return ""
    try:
        text = path.read_bytes().decode(errors="replace")
        readable = isinstance(yaml.safe_load(text), dict)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        readable = False
    if not readable:
        raise InputError(f"{path} is not a configuration. Remove or repair it.")
    return text.strip()


def _environment(path: Path) -> tuple[dict[str, str], str]:
    """The machine and package versions of the run if it recorded them, else of this process; and a note on which."""
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return {str(name): str(value) for name, value in found.items()}, "Recorded by the run."
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{path} is not a JSON object of names and values. Remove or repair it.") from error
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("pipeloom", "torch", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions, "Recorded when this report was written; the run recorded no environment."
