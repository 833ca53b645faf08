"""Renders timelines and training runs: terminal picture, SVG, offline HTML, Perfetto trace. Needs no torch."""

from pipeloom.report.html import simulation_html, write_report
from pipeloom.report.perfetto import trace, write_trace
from pipeloom.report.plan_page import ShownPlan, plan_html
from pipeloom.report.svg import timeline_svg
from pipeloom.report.terminal import print_timeline

__all__ = [
    "ShownPlan",
    "plan_html",
    "print_timeline",
    "simulation_html",
    "timeline_svg",
    "trace",
    "write_report",
    "write_trace",
]
