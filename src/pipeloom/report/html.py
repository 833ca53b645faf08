"""Offline HTML pages of simulations and training runs: single files without scripts or external resources."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from pipeloom.common.atomic_file import write_whole
from pipeloom.common.quantities import bytes_text, counted, number_text, percent_text, plural, seconds_text
from pipeloom.errors import InputError
from pipeloom.report.experts import expert_curves, expert_layers, expert_maps
from pipeloom.report.findings import events, slow_findings
from pipeloom.report.line_chart import Series, line_chart
from pipeloom.report.perfetto import write_trace
from pipeloom.report.run_files import (
    Metrics,
    read_configuration,
    read_environment,
    read_metrics,
    read_rewinds,
    read_timelines,
)
from pipeloom.report.svg import timeline_svg
from pipeloom.sim.spans import Collective
from pipeloom.sim.timeline import Timeline
from pipeloom.version import __version__

if TYPE_CHECKING:
    import jinja2

_CHARTS = (
    ("gradient norm", "grad_norm"),
    ("learning rate", "lr"),
    ("auxiliary losses, weighted", "auxiliary_loss"),
    ("tokens per second", "tokens_per_second"),
    ("seconds per step", "step_seconds"),
    ("bubble", "bubble_fraction"),
)


def simulation_html(timelines: Sequence[Timeline], *, critical: bool = False) -> str:
    """A page with pictures of `timelines` at the same scale, and tables of their per-rank numbers.

    Args:
        timelines: at least one.
        critical: whether to mark the critical path.
    """
    return render(
        "simulation.html.j2",
        title=" and ".join(dict.fromkeys(timeline.name for timeline in timelines)),
        lead=f"{timelines[0].num_ranks} ranks, {timelines[0].num_microbatches} micro-batches",
        timelines=timelines,
        picture=Markup(timeline_svg(timelines, critical=critical)),
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
    timelines = read_timelines(output_dir / "timelines.json")
    report = output_dir / "report.html"
    page = run_page(output_dir, metrics, timelines)
    try:
        write_whole(report, page.encode(errors="replace"))  # files may have halves of surrogate pairs
        if "measured" in timelines:
            write_trace(timelines["measured"], output_dir / "timeline.json.gz")
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}. The report is written to the directory of the run: make it writable "
            "and free space on its disk."
        ) from error
    return report


def render(template: str, **values: Any) -> str:
    """Render a template of this directory. Text is escaped unless it is `Markup`."""
    return str(_environment().get_template(template).render(**values))


@cache
def _environment() -> "jinja2.Environment":
    """Keeps the templates that it has compiled."""
    import jinja2

    loader, strict = jinja2.FileSystemLoader(Path(__file__).parent), jinja2.StrictUndefined
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True
    )
    texts = {
        "seconds": seconds_text,
        "number": number_text,
        "bytes": bytes_text,
        "percent": percent_text,
        "counted": counted,
    }
    environment.globals.update(texts, version=__version__)
    return environment


def run_page(
    output_dir: Path,
    metrics: Metrics,
    timelines: dict[str, Timeline],
    template: str = "run.html.j2",
    **more: Any,
) -> str:
    """The page of a run.

    Args:
        output_dir: its directory.
        metrics, timelines: of it.
        template: that page, or one that extends it.
        more: values for the template.
    """
    lead = f"Training run, steps {metrics.steps[0]['step']} to {metrics.steps[-1]['step']}"
    shown = [timelines[kind] for kind in ("measured", "predicted") if kind in timelines]
    titles = [
        f"{'measured' if timeline.kind == 'measured' else 'predicted'}: {seconds_text(timeline.makespan)}, bubble "
        f"{percent_text(timeline.bubble_fraction)}"
        for timeline in shown
    ]
    if shown:
        lead += f"; schedule {shown[0].name} on {counted(shown[0].num_ranks, 'rank')}, "
        lead += f"{counted(shown[0].num_microbatches, 'micro-batch')} per step"
    environment, environment_note = read_environment(output_dir / "environment.json")
    layers = expert_layers(metrics.steps)
    memory, live = metrics.per_rank("peak_memory_bytes"), metrics.per_rank("live_activations")
    loss = [Series(label="training loss", points=metrics.series("loss"))]
    if metrics.evaluations:
        loss.append(Series(label="validation loss", points=metrics.series("eval_loss"), style="b", marks=True))
    return render(
        template,
        title=output_dir.resolve().name,
        lead=lead,
        warnings=_warnings(metrics),
        tiles=_tiles(metrics),
        evaluated=bool(metrics.evaluations),
        loss_chart=Markup(line_chart(loss, width=1040, height=300)),
        slow=slow_findings(metrics.steps, replicas=len(memory) > len(live) > 0),
        events=events(metrics.steps, read_rewinds(output_dir / "rewinds.json")),
        picture=Markup(timeline_svg(shown, titles=titles)) if shown else "",
        no_picture="This run recorded no timeline: timelines.json is not in its directory.",
        ranks=_ranks(memory, live),
        collectives=_collectives(timelines.get("measured")),
        expert_maps=expert_maps(layers),
        expert_curves=expert_curves(layers),
        charts=_charts(metrics),
        configuration=read_configuration(output_dir / "config.yaml"),
        environment=environment,
        environment_note=environment_note,
        **more,
    )


def _warnings(metrics: Metrics) -> list[str]:
    found, skipped = [], metrics.skipped
    for key, name in (("loss", "training loss"), ("eval_loss", "validation loss"), ("grad_norm", "gradient norm")):
        expected = skipped if key == "grad_norm" else ()
        bad = [int(at) for at, value in metrics.series(key) if not math.isfinite(value) and int(at) not in expected]
        if bad:
            steps = ", ".join(map(str, bad[:12])) + (f" and {len(bad) - 12} more" if len(bad) > 12 else "")
            found.append(f"The {name} was not finite at {plural('step', len(bad))} {steps} (red crosses below).")
    if metrics.truncated:
        found.append("The last line of metrics.jsonl is incomplete: the run was killed while it wrote the line.")
    return found


def _tiles(metrics: Metrics) -> list[dict[str, str]]:
    tiles = []

    def add(label: str, value: str, note: str = "") -> None:
        tiles.append({"label": label, "value": value, "note": note})

    if losses := metrics.series("loss"):
        add("training loss", number_text(losses[-1][1]), f"at step {metrics.steps[-1]['step']}")
    if evaluations := metrics.series("eval_loss"):
        finite = [(value, step) for step, value in evaluations if math.isfinite(value)]
        best = f"best {number_text(min(finite)[0])} at step {min(finite)[1]:.0f}" if finite else ""
        add("validation loss", number_text(evaluations[-1][1]), best)
    for label, key, text in (
        ("tokens per second", "tokens_per_second", number_text),
        ("seconds per step", "step_seconds", seconds_text),
        ("bubble", "bubble_fraction", percent_text),
    ):
        if (median := metrics.median(key)) is not None:
            predicted = metrics.median(f"predicted_{key}")
            add(label, text(median), "median" if predicted is None else f"median; predicted {text(predicted)}")
    if memory := [value for value in metrics.per_rank("peak_memory_bytes") if math.isfinite(value)]:
        add("peak memory", bytes_text(max(memory)), "maximum over processes")
    if scales := metrics.series("loss_scale"):
        add("loss scale", number_text(scales[-1][1]), f"{counted(len(metrics.skipped), 'optimizer step')} skipped")
    return tiles


def _ranks(memory: list[float], live: list[float]) -> list[dict[str, str]]:
    """Rows of text per process, from the peak memory of each and the peak live activations of each rank."""
    most = max((value for value in memory if math.isfinite(value)), default=0.0)
    count = max(len(memory), len(live))
    ranks = len(live) or count  # ranks per data-parallel replica; memory is listed replica by replica
    memory = [*memory, *[math.nan] * (count - len(memory))]
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


def _collectives(timeline: Timeline | None) -> list[dict[str, str]]:
    """Per axis and collective, calls, bytes and time inside the actions of one step, means over ranks."""
    if timeline is None or not timeline.collectives:
        return []
    groups: dict[tuple[str, str], list[Collective]] = {}
    for row in timeline.collectives:
        for each in row:
            groups.setdefault((each.axis, each.name), []).append(each)
    ranks = timeline.num_ranks
    return [
        {
            "axis": axis,
            "name": name,
            "calls": number_text(len(found) / ranks),
            "bytes": bytes_text(sum(each.num_bytes for each in found) / ranks),
            "time": seconds_text(seconds := math.fsum(each.end - each.start for each in found) / ranks),
            "share": percent_text(seconds / timeline.makespan),
        }
        for (axis, name), found in sorted(groups.items())
    ]


def _charts(metrics: Metrics) -> list[dict[str, Any]]:
    charts = []
    for title, key in _CHARTS:
        series, keys = [Series(label=title, points=metrics.series(key))], []
        if predicted := metrics.series(f"predicted_{key}"):
            series.append(Series(label=f"{title}, predicted", points=predicted, style="b"))
            keys = [("a", "measured"), ("b", "predicted")]
        if series[0].points:
            charts.append({"title": title, "legend": keys, "svg": Markup(line_chart(series))})
    return charts
