"""TeraPipe's experiments (arXiv:2102.07988), predicted from data sheets beside what the paper measured.

Every row is one model on a number of p3.16xlarge nodes with a split over data, pipeline and tensor; micro-batches of
one sequence, without and with slices.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.report import environment, markdown, save, table
from benchmarks.terapipe_paper.transformer_times import pipeline_stages, step_end_seconds

from pipeloom.plan.cluster import Cluster, parse_cluster
from pipeloom.plan.slicing import slice_batch, slicing_timeline

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of the paper and its two times in seconds.

    `source` is "calibrated" where the cluster's efficiency was chosen by them, else what they were compared with:
    "table", "code" or "figure" (README.md).
    """

    number: str
    model: str
    layers: int
    width: int
    sequence: int
    batch: int
    data: int
    pipeline: int
    tensor: int
    without: float
    with_slices: float
    slices: tuple[int, ...] | None
    source: str

    @property
    def microbatches(self) -> int:
        return self.batch // self.data


def predict(row: Row, cluster: Cluster, *, grid: int = 8) -> dict[str, Any]:
    """Seconds of an iteration without slices, with the paper's (where they are known), and with those found here."""
    sizes = {"layers": row.layers, "width": row.width, "pipeline": row.pipeline, "tensor": row.tensor}
    stages = pipeline_stages(cluster, **sizes, heads=row.width // 128)
    end = step_end_seconds(cluster, **sizes, data=row.data)
    found = slice_batch(
        stages, sequence=row.sequence, num_ranks=row.pipeline, batch=row.microbatches, grid=grid, max_piece=1
    )

    def seconds(slices: tuple[int, ...]) -> float:
        return end + slicing_timeline(stages, [slices] * row.microbatches, num_ranks=row.pipeline).makespan

    return {
        "row": row.number,
        "without_seconds": seconds((row.sequence,)),
        "with_seconds": seconds(found.slices[0]),
        "with_the_papers_slices_seconds": None if row.slices is None else seconds(row.slices),
        "slices": found.slices[0],
        "step_end_seconds": end,
    }


def read_rows(path: Path = HERE / "experiments.json") -> list[Row]:
    """The settings and published times in a file; README.md says which were compared with the paper."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**{**row, "slices": row["slices"] and tuple(row["slices"])}) for row in rows]


def cells(row: Row, answer: dict[str, Any]) -> list[object]:
    """One line of the table."""

    def off(predicted: float, published: float) -> str:
        return f"{100 * (predicted / published - 1):+.0f} %"

    without, with_, papers = (answer[f"{what}_seconds"] for what in ("without", "with", "with_the_papers_slices"))
    return [
        f"{row.model} ({row.number})",
        row.source,
        f"{row.data} x {row.pipeline} x {row.tensor}",
        f"{row.without:.3f}",
        f"{without:.3f}",
        off(without, row.without),
        f"{row.with_slices:.3f}",
        "" if papers is None else f"{papers:.3f}",
        "" if papers is None else off(papers, row.with_slices),
        f"{row.without / row.with_slices:.2f}",
        f"{without / (papers or with_):.2f}",
        f"{with_:.3f}",
        len(answer["slices"]),
    ]


HEADER = (
    "model, row",
    "published",
    "data x pipe x op",
    "without",
    "predicted",
    "off",
    "with",
    "predicted",
    "off",
    "gain",
    "predicted",
    "best",
    "slices",
)


def figures(cluster: Cluster) -> str:
    """What the predictions are made of."""
    device, inside, network = cluster.device, cluster.inside_node, cluster.between_nodes
    sums, rate = network.sum_bytes_per_second, network.bytes_per_second
    measured = "" if sums is None else f" ({sums / rate:.0%} of them)"
    return (
        f"{cluster.name}: {cluster.devices_per_node} x {device.name}, "
        f"{device.operations_per_second / 1e12:g} Tflop/s, memory {device.memory_bytes_per_second / 1e9:g} GB/s, "
        f"{device.launch_seconds * 1e6:g} us a kernel\n"
        f"links {inside.bytes_per_second / 1e9:g} GB/s a device, {inside.pair_bytes_per_second / 1e9:g} GB/s a pair, "
        f"{inside.latency_seconds * 1e6:g} us; network {rate * 8e-9:g} Gb/s a node, "
        f"{network.latency_seconds * 1e6:g} us\n"
        f"constants that no data sheet has: efficiency {cluster.efficiency:g}, calibrated on rows 5 and 10; gradients "
        f"are summed at {(rate if sums is None else sums) * 8e-9:g} Gb/s{measured}, measured for NCCL over TCP "
        "(github.com/NVIDIA/nccl/issues/209)\n"
    )


def main() -> None:
    """Predict every row and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.terapipe_paper", description=__doc__)
    parser.add_argument("--cluster", type=Path, default=HERE / "p3.16xlarge.json", help="cluster file")
    parser.add_argument("--experiments", type=Path, default=HERE / "experiments.json", help="rows as in that file")
    parser.add_argument("--efficiency", type=float, help="instead of the cluster file's")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "terapipe_paper.json")
    options = parser.parse_args()
    cluster = parse_cluster(options.cluster.read_text(encoding="utf-8"))
    if options.efficiency is not None:
        cluster = replace(cluster, efficiency=options.efficiency)
    print(figures(cluster))
    rows = read_rows(options.experiments)
    answers = [predict(row, cluster) for row in rows]
    parts = [table(HEADER, [cells(row, answer) for row, answer in zip(rows, answers, strict=True)])]
    print(markdown(parts))
    save(options.output, {"efficiency": cluster.efficiency}, environment(), answers, parts)


if __name__ == "__main__":
    main()
