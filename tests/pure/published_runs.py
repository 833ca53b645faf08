"""Published runs of transformers on named clusters: what is known of each, and the prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from pipeloom.ir.data_axis import DataStrategy
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel import Precision
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.named_clusters import CLUSTERS
from pipeloom.plan.costs.software import SOFTWARE
from pipeloom.plan.named_architectures import NAMED

Use = Literal["seen", "held out"]
_ORDER = ("pp", "dp", "cp", "tp")  # Megatron-LM's
_DGX = CLUSTERS["dgx-a100-80"]
# github.com/bigscience-workshop/bigscience, train/tr11-176B-ml/README.md: 4 Omni-Path links per node
SITE = "`dgx-a100-80` with 4 network cards of 100 Gbit/s"
_CLUSTERS = {**CLUSTERS, SITE: replace(_DGX, between_nodes=replace(_DGX.between_nodes, bytes_per_second=50e9, cards=4))}


@cache
def gpt(layers: int, width: int, heads: int, *, sequence: int = 2048, vocabulary: int = 51200) -> Architecture:
    return Architecture(
        name=f"gpt-{layers}-{width}",
        layers=layers,
        width=width,
        heads=heads,
        key_heads=heads,
        mlp_width=4 * width,
        vocabulary_size=vocabulary,
        sequence_length=sequence,
        positions="learned",
        biases=True,
        tie_embeddings=True,
    )


@cache
def cost_model(model: Architecture, cluster: str, software: str) -> CostModel:
    return CostModel(model=model, cluster=_CLUSTERS[cluster], software=SOFTWARE[software])


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured run.

    Attributes:
        table: where it is published.
        name: of the row.
        model, cluster, software, of: what ran.
        seconds: per step, measured.
        use: whether it was looked at when constants and efficiencies were chosen.
        without_barrier: whether steps overlap, so that the longest rank counts and not the makespan.
        memory_limit: of schedules that are built for one.
    """

    table: str
    name: str
    model: Architecture
    cluster: str
    software: str
    of: Configuration
    seconds: float
    use: Use = "held out"
    without_barrier: bool = False
    memory_limit: float | None = None

    def predicted(self) -> float:
        """Seconds per step."""
        return _predicted(self)

    def _predict(self) -> float:
        costs = cost_model(self.model, self.cluster, self.software)
        program = costs.program(self.of, costs.schedule(self.of, self.memory_limit))
        found = costs.predict(self.of, program)
        return found.timeline.span_seconds + found.update_seconds if self.without_barrier else found.step_seconds


@cache
def _predicted(run: Run) -> float:
    return run._predict()


def configuration(
    pipeline: int, tensor: int, data: int, size: int, batch: int, chunks: int = 1, **others: Any
) -> Configuration:
    """As Megatron-LM runs it: 16-bit gradients, interleaved where there are chunks."""
    options = {"recompute": Recompute.FULL, "inside": InsideStage(tensor=tensor)} | others
    return Configuration(
        schedule="interleaved" if chunks > 1 else "1f1b",
        pipeline=pipeline,
        chunks=chunks,
        microbatches=batch // data // size,
        microbatch_size=size,
        data=data,
        precision=Precision("bf16", "same"),
        order=_ORDER,
        **options,
    )


def megatron_operations(model: Architecture, batch: int) -> float:
    """Of a step, with recomputation and all scores: arXiv:2104.04473, equation 3."""
    layers, width, tokens = model.layers, model.width, model.sequence_length
    rest = 1 + tokens / (6 * width) + model.vocabulary_size / (16 * layers * width)
    return 96 * batch * tokens * layers * width**2 * rest


def weak_scaling() -> list[Run]:
    """arXiv:2104.04473, table 1; micro-batches and chunks: Megatron-LM, examples/sc21/run_table_1.sh."""
    found = []
    for name, sizes, degrees, size, batch, chunks, tflops in (
        ("1.7B", (24, 2304, 24), (1, 1, 32), 16, 512, 1, 137),
        ("3.6B", (30, 3072, 32), (1, 2, 32), 16, 512, 1, 138),
        ("7.5B", (36, 4096, 32), (1, 4, 32), 16, 512, 1, 142),
        ("18.4B", (40, 6144, 48), (1, 8, 32), 8, 1024, 1, 135),
        ("39.1B", (48, 8192, 64), (2, 8, 32), 4, 1536, 1, 138),
        ("76.1B", (60, 10240, 80), (4, 8, 32), 2, 1792, 3, 140),
        ("145.6B", (80, 12288, 96), (8, 8, 24), 2, 2304, 2, 148),
        ("310.1B", (96, 16384, 128), (16, 8, 15), 1, 2160, 2, 155),
        ("529.6B", (105, 20480, 128), (35, 8, 9), 1, 2520, 3, 163),
        ("1008B", (128, 25600, 160), (64, 8, 6), 1, 3072, 1, 163),
    ):
        model, of = gpt(*sizes), configuration(*degrees, size, batch, chunks)
        seconds = megatron_operations(model, batch) / of.devices / (tflops * 1e12)
        found.append(
            Run(
                table="arXiv:2104.04473, table 1",
                name=name,
                model=model,
                cluster="dgx-a100-80",
                software="megatron-2021",
                of=of,
                seconds=seconds,
                use="seen",
            )
        )
    return found


def recomputation() -> list[Run]:
    """arXiv:2205.05198, tables 3 and 5."""
    found = []
    for name, sizes, pipeline, size, batch, chunks, full, selective in (
        ("22B", (48, 6144, 64), 1, 4, 4, 1, 1.42, 1.10),
        ("175B", (96, 12288, 96), 8, 1, 64, 3, 18.13, 13.75),
        ("530B", (105, 20480, 128), 35, 1, 280, 3, 49.05, 37.83),
        ("1T", (128, 25600, 160), 64, 1, 512, 1, 94.42, 71.49),
    ):
        less = {"recompute": Recompute.SELECTIVE, "inside": InsideStage(tensor=8, sequence=True)}
        for what, seconds, others in (("full", full, {}), ("selective", selective, less)):
            found.append(
                Run(
                    table="arXiv:2205.05198, table 5",
                    name=f"{name} {what}",
                    model=gpt(*sizes),
                    cluster="dgx-a100-80",
                    software="megatron-2022",
                    of=configuration(pipeline, 8, 1, size, batch, chunks, **others),
                    seconds=seconds,
                    use="seen",
                )
            )
    return found


def more_replicas() -> list[Run]:
    """arXiv:2104.04473, table 2: GPT-3 with 4, 8 and 16 replicas."""
    model, found = gpt(96, 12288, 96), []
    for data, tflops in ((4, 153), (8, 149), (16, 141)):
        of = configuration(12, 8, data, 1, 1536)
        found.append(
            Run(
                table="arXiv:2104.04473, table 2",
                name=f"174.6B, {of.devices:,} devices",
                model=model,
                cluster="dgx-a100-80",
                software="megatron-2021",
                of=of,
                seconds=megatron_operations(model, 1536) / of.devices / (tflops * 1e12),
            )
        )
    return found


def microbatch_sizes() -> list[Run]:
    """On the nodes of the data sheet; see `on_its_network`."""
    return _big_science("dgx-a100-80", ((80, 13824, 10, 8, 4, ((1, 160.3), (2, 151.1), (4, 147.4), (8, 152.5))),))


def on_its_network() -> list[Run]:
    """On the network of the site, before and after a repair of the hosts, on 25 February 2022."""
    before = (
        (80, 13824, 10, 8, 4, ((1, 160.3), (2, 151.1), (4, 147.4), (8, 152.5))),
        (72, 14336, 12, 8, 4, ((1, 143.31), (2, 134.02), (4, 123.69), (8, 129.26))),
        (72, 14336, 6, 8, 8, ((1, 139.82), (2, 131.02), (4, 121.48))),
    )
    after = (
        (72, 14336, 12, 8, 4, ((2, 128.82), (4, 117.07))),
        (72, 14336, 6, 8, 8, ((4, 114.11),)),
        (72, 14336, 12, 4, 8, ((2, 110.48), (4, 111.89))),
        (72, 14336, 24, 2, 8, ((1, 119.53), (2, 122.75))),
        (72, 14336, 24, 4, 4, ((1, 130.60),)),
        (72, 14336, 12, 2, 16, ((2, 112.50),)),
    )
    return [*_big_science(SITE, before, " before"), *_big_science(SITE, after, " after")]


_Series = tuple[int, int, int, int, int, tuple[tuple[int, float], ...]]


def _big_science(cluster: str, series: tuple[_Series, ...], when: str = "") -> list[Run]:
    """github.com/bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md."""
    found = []
    for layers, width, pipeline, tensor, data, rows in series:
        for size, seconds in rows:
            found.append(
                Run(
                    table="BigScience, 200B",
                    name=f"{layers} x {width:,} P{pipeline} T{tensor} D{data}, size {size}{when}",
                    model=gpt(layers, width, 64, vocabulary=250880),
                    cluster=cluster,
                    software="megatron-blocking",
                    of=configuration(pipeline, tensor, data, size, 2048, strategy=DataStrategy.ZERO1),
                    seconds=seconds,
                    use="seen" if width == 13824 else "held out",
                )
            )
    return found


def layouts() -> list[Run]:
    """github.com/DS3Lab/Decentralized_FM_alpha, results/NeurIPS2022_submission.md, case 1: 64 V100."""
    found = []
    for layers, rows in (
        (24, ((8, 1, 16.9), (1, 8, 25.0), (4, 2, 12.5), (2, 4, 14.3))),
        (32, ((1, 8, 32.59), (4, 2, 15.38), (2, 4, 18.44))),
        (40, ((1, 8, 40.46), (4, 2, 18.88), (2, 4, 22.60))),
    ):
        for pipeline, tensor, seconds in rows:
            found.append(
                Run(
                    table="GPT-XL, 64 V100",
                    name=f"{layers} layers P{pipeline} T{tensor} D8",
                    model=gpt(layers, 2048, 16, vocabulary=50304),
                    cluster="p3.16xlarge",
                    software="megatron-2021",
                    of=configuration(pipeline, tensor, 8, 1, 1024),
                    seconds=seconds,
                    use="seen" if layers == 24 else "held out",
                )
            )
    return found


def llama() -> list[Run]:
    """arXiv:2407.21783, table 4: Llama 3 405B."""
    found = []
    for data, microbatches, context, sequence, tflops in (
        (64, 32, 1, 8192, 430),
        (128, 16, 1, 8192, 400),
        (8, 16, 16, 131072, 380),
    ):
        model = replace(NAMED["llama3-405b"], sequence_length=sequence)
        of = Configuration(
            schedule="interleaved",
            pipeline=16,
            chunks=8,
            microbatches=microbatches,
            data=data,
            inside=InsideStage(tensor=8, sequence=True, context=context),
            strategy=DataStrategy.ZERO1,
        )
        work = cost_model(model, "dgx-h100", "pipeloom").times(of, Recompute.NONE).operations()
        found.append(
            Run(
                table="arXiv:2407.21783, table 4",
                name=f"405B, {sequence:,} tokens, {of.devices:,} devices",
                model=model,
                cluster="dgx-h100",
                software="pipeloom",
                of=of,
                seconds=work * microbatches * data / of.devices / (tflops * 1e12),
                use="seen" if context == 1 else "held out",
            )
        )
    return found


TABLES = (weak_scaling, more_replicas, recomputation, microbatch_sizes, on_its_network, layouts, llama)
