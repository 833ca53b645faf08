"""The sections of a configuration: the options of data, model, parallelism, batch, precision, optimizer and memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pipeloom.common.quantities import Bytes
from pipeloom.parallel.options import BUCKET_BYTES


def option(default: Any, text: str) -> Any:
    """A field of a configuration, with its default and its help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    path: str | None = option(None, "directory, file or glob of text; left out: the .py files of Python's library")
    tokenizer: str | None = option(None, "tokenizer.json of the tokenizers library; left out: bytes, vocabulary 256")
    validation_fraction: float = option(0.05, "share of the files that is held out for evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    layers: int = option(6, "number of transformer blocks")
    width: int = option(192, "size of the residual stream")
    heads: int = option(6, "number of attention heads; divides the width")
    sequence_length: int = option(128, "tokens a sample")
    tie_embeddings: bool = option(False, "one matrix for the embedding and the output head")
    positions: Literal["rotary", "learned"] = option("rotary", "how positions enter")
    dropout: float = option(0.0, "dropout probability")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    pipeline: int = option(2, "number of ranks of the pipeline; of stages where parallel.replicas is given")
    replicas: str | None = option(
        None, "ranks of each stage, such as 2,1, for pipedream and pipedream-2bw; left out: one each"
    )
    in_flight: Literal["noam", "full"] = option(
        "noam", "micro-batches in flight with replicas: as PipeDream has it, or what the full period needs"
    )
    chunks: int | None = option(None, "stages a rank; left out: the schedule's own number")
    cut: str = option("layers", "where stages begin: layers, parameters, time, or blocks a stage such as 5,3")
    slices: int | str | None = option(
        None, "cut every sequence: a number, lengths such as 1600,1344,1152, or auto: measured here; left out: whole"
    )
    transport: Literal["auto", "shared-memory", "torch"] = option("auto", "how messages travel between ranks")
    data: int = option(
        1,
        "copies of the pipeline, each with samples of its own; each has parallel.pipeline processes; -1 under "
        "torchrun: as many as its processes make",
    )
    data_strategy: Literal["ddp", "parameter-server", "zero1", "zero2", "zero3"] = option(
        "ddp",
        "what a copy keeps: ddp all, parameter-server and zero1 all but optimizer states, zero2 a share of gradients "
        "too, zero3 a share of parameters too",
    )
    data_granularity: Literal["step", "chunk", "microbatch"] | None = option(
        None,
        "how often zero3 gathers parameters, and zero2 and zero3 share gradients: each needs less memory than the one "
        "before, and communicates more; left out: once a step",
    )
    data_bucket_bytes: Bytes = option(  # noqa: RUF009  # it makes a field, of an immutable default
        Bytes(BUCKET_BYTES),
        "parameters of so many bytes are gathered and summed together: more is fewer messages, less is more of them "
        "beside computations",
    )
    order: str = option("dp,pp", "axis whose neighbours stand farthest apart, then the others: dp,pp or pp,dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    size: int = option(32, "samples a step, over all micro-batches of all copies")
    microbatches: int | None = option(
        None,
        "micro-batches a step of each copy of the pipeline; left out: 8, or one a sample where there are fewer; "
        "pipedream: 1",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32", "format of parameters in forwards and backwards, and of messages; updates are of float32 numbers"
    )
    gradients: Literal["float32", "same"] = option(
        "float32", "format in which gradients of micro-batches add up; same: that of the parameters"
    )
    loss_scale: float = option(65536.0, "fp16: factor of the first step's loss; overflows halve it")
    loss_scale_steps: int = option(2000, "fp16: after so many steps without overflow the factor doubles")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adamw", "adam", "sgd", "momentum", "muon"] = option(
        "adamw", "muon: matrices of the blocks by Muon, all else by AdamW"
    )
    learning_rate: float = option(2e-3, "largest learning rate; of muon that of AdamW, and see muon_learning_rate")
    warmup_steps: int = option(20, "steps of linear warm-up")
    min_learning_rate_fraction: float = option(0.1, "learning rate at the last step, as a fraction of the largest")
    weight_decay: float = option(
        0.1, "weight decay of matrices; vectors have none; adam, sgd and momentum add it to the gradient"
    )
    beta1: float = option(0.9, "adamw, adam, muon: decay of the first moment")
    beta2: float = option(0.95, "adamw, adam, muon: decay of the second moment")
    momentum: float = option(0.95, "momentum, muon: decay of the sum of gradients")
    nesterov: bool = option(True, "momentum, muon: look ahead by one step")
    muon_learning_rate: float = option(0.02, "muon: largest learning rate of the matrices that it updates")
    clip_norm: float = option(
        1.0,
        "largest gradient norm over all stages; in a stream (pipedream) of each stage by itself, over the root of "
        "their number; 0: no clipping",
    )
    barrier: bool = option(
        True, "ranks wait for the norm of all before they update; false: they go on at once and validate later"
    )
    staleness: str = option(
        "none",
        "what pipedream and pipedream-2bw do to the learning rate of gradients that are late: none, inverse, "
        "or pipemare:K over the first K steps",
    )
    replica_scaling: bool = option(
        False,
        "pipedream with replicas: learning rate of a stage times the batches of its update over the first stage's",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    cap: Bytes | None = option(  # noqa: RUF009
        None,
        "most bytes that a rank may hold, such as 16GiB, as `pipeloom memory` counts them: recompute and "
        "parallel.data_granularity are then chosen",
    )
    recompute: str = option(
        "none",
        "what backwards compute again instead of keeping it: none, selective (attention), full (every block), or one "
        "word a stage such as full,none",
    )
    offload: str | None = option(None, "where to what is not needed at once: cpu, or disk:PATH; left out: nowhere")
    offload_states: bool = option(True, "with offload: optimizer states go there")
    offload_parameters: bool = option(
        False,
        "with offload: parameters of zero3, also of one copy, and float32 masters of bf16 and fp16 go there between "
        "updates",
    )
    offload_activations: int | None = option(
        None,
        "with offload: how many activations a rank keeps, others go there; 0: as few as moves can keep; left out: all",
    )
