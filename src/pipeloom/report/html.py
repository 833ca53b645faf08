"""Offline HTML pages: single files without scripts or external resources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeloom.common.quantities import bytes_text, number_text, seconds_text
from pipeloom.report.svg import timeline_svg
from pipeloom.sim.timeline import Timeline
from pipeloom.version import __version__


def simulation_html(timelines: Sequence[Timeline], *, title: str | None = None, critical: bool = False) -> str:
    """A page with pictures of `timelines` at the same scale, and tables of their per-rank numbers.

    Args:
        timelines: at least one.
        title: the heading; defaults to the names of the timelines.
        critical: whether to mark the critical path.
    """
    from markupsafe import Markup

    first = timelines[0]
    return render(
        "simulation.html.j2",
        title=title or " and ".join(dict.fromkeys(timeline.name for timeline in timelines)),
        lead=f"{first.num_ranks} ranks, {first.num_microbatches} micro-batches",
        timelines=timelines,
        picture=Markup(timeline_svg(timelines, critical=critical)),
    )


def render(template: str, **values: Any) -> str:
    """Render a template of this directory. Text is escaped unless it is `Markup`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(version=__version__, seconds=seconds_text, number=number_text, bytes=bytes_text)
    environment.globals["percent"] = percent_text
    return environment.get_template(template).render(**values)


def percent_text(fraction: float) -> str:
    """``0.2727`` -> ``"27.3 %"``."""
    return f"{100 * fraction:.1f} %"
