"""Render docs/benchmarks.md and the tables of other pages: ``python -m benchmarks.tables``.

All figures of these tables come from benchmarks/*/results/*.json; none is typed by hand. tests/pure/test_docs.py fails
where the committed pages are not what this module renders.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.report import FORMAT, MEASURED, markdown, parts_from_json, table
from benchmarks.common.statistics import Spread
from benchmarks.reliability.report import parts as reliability_parts
from pipeloom.version import __version__

BENCHMARKS = Path(__file__).parent
ROOT = BENCHMARKS.parent
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
RELIABILITY = ROOT / "docs" / "explanation" / "reliability.md"
EXPERTS = ROOT / "docs" / "explanation" / "experts.md"
INTRODUCTION = """\
# Benchmarks

`python -m benchmarks.tables` generates this page from the JSON files that the benchmarks write. Do not edit it.

Every benchmark compares losses and gradients before it times anything. Systems take turns within a round, and a
ratio is taken within one round. Tables show the median, with the quartiles in parentheses. Background load widens the
quartiles and moves ratios towards 1. [benchmarks/README.md](../benchmarks/README.md) explains the method and how to
install the peers."""
NOT_MEASURED = "Not measured on this version"


class Headline(NamedTuple):
    """A row of the README's table: what is compared, and where its number stands in the JSON of which benchmark."""

    claim: str
    benchmark: str
    name: str


HEADLINES = [
    Headline(
        "Step time, 1F1B, 4 x 256 tokens per micro-batch: pipeloom / torch.distributed.pipelining",
        "step_time",
        "4x256 M=8: pipeloom 1f1b / torch 1f1b",
    ),
    Headline(
        "Step time, 1F1B, 4 x 256 tokens per micro-batch: pipeloom / DeepSpeed",
        "step_time",
        "4x256 M=8: pipeloom 1f1b / deepspeed 1f1b",
    ),
    Headline("Step time, ZB-V on 4 ranks: pipeloom / torch.distributed.pipelining", "schedules", "4 ranks: zb-v"),
    Headline(
        "Step with update, 2 ranks x 2 replicas, 4 x 64 tokens: pipeloom `ddp` / torch with DDP",
        "data_parallel",
        "4x64 M=8: pipeloom 1f1b ddp / torch 1f1b ddp",
    ),
    Headline("Measured / simulated step time, 1F1B, 8 ranks", "emulated", "8 ranks: 1f1b, measured / simulated"),
    Headline(
        "Speed-up on one sequence of 4,096 tokens, 2 ranks: 1F1B / Seq1F1B with 8 slices",
        "slices",
        "1f1b / seq1f1b, 8 slices",
    ),
    Headline(
        "Step time, 2 tensor-parallel ranks, 4 x 256 tokens: pipeloom / DTensor (`parallelize_module`)",
        "tensor_parallel",
        "1d, width 256, 4x256 tokens, M=2: pipeloom 1d / DTensor",
    ),
    Headline(
        "CPU time per micro-batch of 8 x 256 tokens: GPT with 8 experts, 2 per token / dense GPT of equal arithmetic",
        "experts",
        "gpt, width 256, 8 x 256 tokens: topk / dense",
    ),
    Headline(
        "CPU time per micro-batch, experts on 2 processes, 4 x 256 tokens each: pipeloom / DeepSpeed's MoE",
        "experts",
        "processes, width 256, 4 x 256 tokens each: pipeloom ep=2 / deepspeed ep=2, cpu",
    ),
    Headline(
        "Speed-up on one sequence of 8,192 tokens, 2 ranks: one process / ring attention",
        "context",
        "one process / ring",
    ),
]


def benchmarks() -> list[str]:
    """The names of all benchmarks: folders that run as modules."""
    return sorted(path.parent.name for path in BENCHMARKS.glob("*/__main__.py"))


def results_of(benchmark: str) -> list[dict[str, Any]]:
    """The result files of a benchmark; those measured on this version first."""
    files = sorted((BENCHMARKS / benchmark / "results").glob("*.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    for path, result in zip(files, found, strict=True):
        if result.get("format") != FORMAT:
            raise SystemExit(f"{path.relative_to(ROOT)}: format must be {FORMAT!r}. Run the benchmark again.")
    return sorted(found, key=lambda result: not is_current(result))


def is_current(result: dict[str, Any]) -> bool:
    """Whether the benchmark itself wrote the file, with this version of pipeloom."""
    return bool(result["source"] == MEASURED and result["version"] == __version__)


def page() -> str:
    """The text of docs/benchmarks.md."""
    text = [INTRODUCTION]
    for benchmark in benchmarks():
        text += section(benchmark)
    return "\n\n".join(text) + "\n"


def section(benchmark: str) -> list[str]:
    """The part of the page about one benchmark."""
    lines = (BENCHMARKS / benchmark / "README.md").read_text(encoding="utf-8").splitlines()
    title = lines[0].removeprefix("# ")
    text = [f"## {title}", f"[benchmarks/{benchmark}](../benchmarks/{benchmark}/README.md) describes the method."]
    results = results_of(benchmark)
    if not any(map(is_current, results)):
        text.append(f"{NOT_MEASURED}: run `python -m benchmarks.{benchmark}`.")
    for result in results:
        text.append(provenance(result))
        text.append(re.sub("^### ", "#### ", markdown(parts_from_json(result["parts"])), flags=re.MULTILINE))
    return text


def provenance(result: dict[str, Any]) -> str:
    """Which version was measured when, on what machine, and by which command."""
    machine = result["environment"]
    packages = ("python", "torch", "deepspeed", "numpy", "scipy", "ortools")
    versions = ", ".join(f"{name} {machine[name]}" for name in packages if machine.get(name))
    facts = [f"version {result['version']}", str(machine["date"])[:10]]
    facts.append(f"{machine['cores']} cores of {machine['processor']}")
    facts += [fact for fact in (versions, *(f"{key} {value}" for key, value in result["settings"].items())) if fact]
    source = "" if result["source"] == MEASURED else f" Source: {result['source']}."
    kind = "Measured" if is_current(result) else "Earlier result"
    return f"*{kind}: {', '.join(facts)}.{source}*\n\n`{result['command']}`"


def headline_table() -> str:
    """The table of the README."""
    rows = []
    for claim, benchmark, name in HEADLINES:
        results = results_of(benchmark)
        found = next((result for result in results if name in result["headlines"]), None)
        value = "" if found is None else str(Spread(**found["headlines"][name]).show())
        version = (
            NOT_MEASURED.lower() if found is None else found["version"] if is_current(found) else f"{found['version']}*"
        )
        rows.append((claim, value, version, f"`python -m benchmarks.{benchmark}`"))
    made = str(table(("comparison", "median (quartiles)", "version", "command"), rows))
    return re.sub(" {2,}", " ", re.sub(r"-{3,}", "---", made))


def reliability_tables() -> str:
    """The tables of docs/explanation/reliability.md: all runs of all result files together."""
    results = results_of("reliability")
    runs = [run for result in results for run in result["results"]]
    loads = ", ".join(f"{result['environment']['load_before']:.0f}" for result in results)
    measured = f"Load averages of the machine before the commands: {loads}."
    return "\n\n".join([markdown(reliability_parts(runs)), *map(provenance, results), measured])


def mixtures_table() -> str:
    """The table of docs/explanation/experts.md."""
    return "\n\n".join(markdown(parts_from_json(result["parts"])).strip() for result in results_of("mixtures"))


def fill(text: str) -> str:
    """`text` with each table rendered anew between its markers."""
    tables = {"headlines": headline_table, "reliability": reliability_tables, "mixtures": mixtures_table}
    return re.sub(
        r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{tables[match[2]]()}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    """Write all pages."""
    PAGE.write_text(page(), encoding="utf-8")
    for path in (README, RELIABILITY, EXPERTS):
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE, README, RELIABILITY, EXPERTS, sep="\n")


if __name__ == "__main__":
    main()
