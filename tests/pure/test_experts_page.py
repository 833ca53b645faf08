"""The tables of the page about experts are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import tables
from benchmarks.common.report import markdown, parts_from_json

from pipeloom.models.experts.settings import ROUTERS, ExpertSettings
from pipeloom.parallel.expert.sizes import ExpertSizes
from pipeloom.parallel.expert.traffic import dispatch_traffic

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "experts.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table of a section, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_bytes() -> None:
    sizes = ExpertSizes(experts=8, top_k=2, expert_width=512, capacity_factor=1.25)
    found = rows("Bytes")
    assert [row[0] for row in found] == ["`counts`", "`capacity`"]
    for exchange, *_, forward, backward in found:
        traffic = dispatch_traffic(sizes, 4, samples=1, tokens=1024, width=128, element=4, exchange=exchange.strip("`"))
        shown = tuple(int(cell.replace(",", "")) for cell in (forward, backward))
        assert shown == tuple(table["ep", "all_to_all"].num_bytes for table in traffic)


def test_the_table_of_routers() -> None:
    found = {re.match(r"`([a-z-]+)`", row[0])[1]: row for row in rows("Routers")}
    assert set(found) == set(ROUTERS)
    for name, (_, experts, _, capacity, _, weight) in found.items():
        settings = ExpertSettings.of(experts=8, router=name)
        if name == "expert-choice":
            assert (capacity, settings.capacity(16)) == ("`k`", 4)
            assert experts.endswith("`k` = 2 on average")
        else:
            assert str(settings.top_k) in experts
            assert capacity == ("none" if settings.capacity_factor is None else f"{settings.capacity_factor:g}")
        number, _, square = weight.partition(" ")
        shown = 0.0 if number == "none" else float(number) * (64 if square == "`E`²" else 1)
        assert abs(shown - settings.balance_weight) < 1e-12


def test_the_comparison_of_routers_is_the_measured_one() -> None:
    result = tables.results_of("mixtures")[0]
    assert markdown(parts_from_json(result["parts"])) in PAGE
