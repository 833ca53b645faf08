"""Models, batches and processes that are planned and measured, and the configurations that each case has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pipeloom import schedules
from pipeloom.common.division import divisors
from pipeloom.errors import PipeloomError
from pipeloom.ir import DataStrategy
from pipeloom.models import GPTConfig
from pipeloom.parallel import Precision
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.configuration import Configuration, even_blocks

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1")
_STRATEGIES = ("ddp", "zero1")


@dataclass(frozen=True)
class Case:
    """A model, a batch, processes, and the schedules that pipelines have."""

    name: str
    config: GPTConfig
    batch: int
    processes: int
    schedules: tuple[str, ...] = SCHEDULES


def _gpt(layers: int, width: int, length: int, vocabulary: int = 256) -> GPTConfig:
    return GPTConfig(vocabulary_size=vocabulary, layers=layers, width=width, heads=width // 32, sequence_length=length)


MODELS = {
    "narrow": _gpt(8, 96, 64),
    "wide": _gpt(4, 256, 64),
    "vocabulary": _gpt(4, 128, 64, 4096),
}
CASES = [
    Case(f"{name}, batch {batch}, {processes} processes", config, batch, processes)
    for processes in (2, 4)
    for name, config in MODELS.items()
    for batch in (8, 16)
]


def paired(case: Case, rows: list[dict[str, Any]]) -> list[tuple[Configuration, dict[str, Any]]]:
    """The rows of a case, each with the configuration of its label."""
    names = [row["label"].split()[4] for row in rows]
    known = {label(of): of for of in configurations(replace(case, schedules=tuple(dict.fromkeys(names))))}
    return [(known[row["label"]], row) for row in rows]


def configurations(case: Case) -> Iterator[Configuration]:
    """Every configuration of degrees along pp, dp and tp, micro-batches, schedules and strategies that can run."""
    count, batch = case.processes, case.batch
    for data in divisors(count):
        for tensor in divisors(count // data):
            pipeline = count // data // tensor
            if batch % data or case.config.heads % tensor:
                continue
            for size in divisors(batch // data):
                microbatches = batch // data // size
                for name in case.schedules if pipeline > 1 else ("1f1b",):
                    for strategy in _STRATEGIES if data > 1 else _STRATEGIES[:1]:
                        of = _configuration(case, name, pipeline, data, tensor, size, microbatches, strategy)
                        if of is not None:
                            yield of


def _configuration(
    case: Case, name: str, pipeline: int, data: int, tensor: int, size: int, microbatches: int, strategy: str
) -> Configuration | None:
    number = schedules.find(name).chunks
    try:
        schedule = schedules.build(
            name,
            num_ranks=pipeline,
            num_microbatches=microbatches,
            num_chunks=2 if number is None else None,
        )
    except PipeloomError:
        return None
    if schedule.num_stages > case.config.layers or microbatches < pipeline // 2:
        return None
    return Configuration(
        schedule=name,
        pipeline=pipeline,
        chunks=schedule.placement.num_chunks,
        microbatches=microbatches,
        microbatch_size=size,
        data=data,
        strategy=DataStrategy(strategy),
        inside=InsideStage(tensor=tensor),
        precision=Precision("fp32"),
        blocks=tuple(even_blocks(case.config.layers, schedule.num_stages)),
    )


def label(of: Configuration) -> str:
    """``P2 T1 D2 4x2 1f1b ddp``: degrees, micro-batches x their size, schedule, strategy."""
    return (
        f"P{of.pipeline} T{of.inside.tensor} D{of.data} {of.microbatches}x{of.microbatch_size} {of.schedule}"
        f"{f' {of.strategy}' if of.data > 1 else ''}"
    )
