"""The options of `pipeloom train` as dataclasses: name, type, default and one line of help of each."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pipeloom.common.quantities import Bytes
from pipeloom.models.experts.settings import CapacityGroup, RouterName
from pipeloom.parallel.options import BUCKET_BYTES


def option(
    default: Any, text: str, *, unset: str | None = None, value: str | None = None, group: str | None = None
) -> Any:
    """A field of a configuration.

    Args:
        default: its value where none is given.
        text: what it sets; `pipeloom train --help` shows it on one line of 120 columns, with the default behind it.
        unset: what a default of None means.
        value: how the help names the value; by its type if left out.
        group: of the help, for an option outside the sections.
    """
    return field(default=default, metadata={"help": text, "unset": unset, "value": value, "group": group})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    path: str | None = option(
        None, "file, directory, glob or URL of text", value="PATH", unset="Python's standard library"
    )
    mixture: str | None = option(None, "weighted paths in place of path", value="PATH=WEIGHT,..", unset="one path")
    field: str = option("text", "key or column of the text in .jsonl and .parquet files")
    tokenizer: str | None = option(
        None, "tokenizer.json, or directory of one", value="FILE", unset="the model's own, else bytes"
    )
    packing: bool = option(False, "pack JSONL documents; false: pad each")
    validation_fraction: float = option(0.05, "fraction of the documents held out for evaluation")
    cache: str | None = option(
        None, "directory of tokens, which runs may share", value="DIR", unset="data in the output directory"
    )
    workers: int | None = option(None, "most processes that tokenize", unset="the cores")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a GPT."""

    layers: int = option(6, "number of transformer blocks")
    width: int = option(192, "size of the residual stream")
    heads: int = option(6, "number of attention heads; divides the width")
    kv_heads: int | None = option(None, "key and value heads; divides heads", unset="heads")
    # A number in every `TrainConfig`, which fills it in.
    sequence_length: int = option(None, "sequence length in tokens", unset="128; pretrained: at most 1024")
    tie_embeddings: bool = option(False, "shared weight for the embedding and the output head")
    positions: Literal["rotary", "learned"] = option("rotary", "position encoding")
    dropout: float = option(0.0, "dropout probability")
    experts: int = option(0, "experts in place of a block's MLP; 0: none")
    experts_every: int = option(1, "block i has experts if i + 1 is a multiple of it")
    router: RouterName = option("topk", "router")  # noqa: RUF009
    top_k: int | None = option(None, "experts per token", unset="switch: 1, else 2")
    capacity_factor: float | None = option(None, "capacity of an expert in even shares", unset="the router's")
    capacity_by: CapacityGroup = option("batch", "tokens that share a capacity")  # noqa: RUF009
    shared_experts: int = option(0, "experts that every token goes through")
    expert_width: int | None = option(None, "width inside an expert", unset="that of the MLP")
    balance_weight: float | None = option(None, "weight of the load-balancing loss", unset="the router's")
    z_loss_weight: float = option(0.0, "weight of the router z-loss; 0: none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelSizes):
    pretrained: str | None = option(None, "Hugging Face directory to fine-tune", value="DIR", unset="a new GPT")
    lora: int | None = option(None, "rank of LoRA adapters, trained in place of the model", unset="none")
    lora_alpha: float | None = option(None, "scale of LoRA adapters, times their rank", unset="2 * rank")
    lora_targets: str | None = option(None, "modules with adapters", value="NAME,NAME,..", unset="peft's own")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    pipeline: int = option(2, "pipeline ranks; with --parallel.replicas, stages")
    replicas: str | None = option(None, "ranks per stage: 1f1b, asynchronous schedules", value="N,N,..", unset="1")
    in_flight: Literal["noam", "full"] = option("noam", "in-flight limit of asynchronous schedules")
    chunks: int | None = option(None, "virtual stages (chunks) per rank", unset="the schedule's own")
    cut: str = option("layers", "balance layers, parameters or time; or blocks: 5,3", value="CUT")
    slices: int | str | None = option(None, "sequence slices: count, lengths or auto", value="SLICES", unset="1")
    transport: Literal["auto", "shared-memory", "cuda-ipc", "torch"] = option("auto", "transport between ranks")
    data: int = option(1, "data-parallel degree; -1: all remaining processes")
    data_strategy: Literal["ddp", "parameter-server", "zero1", "zero2", "zero3"] = option("ddp", "data strategy")
    data_granularity: Literal["step", "chunk", "microbatch"] | None = option(
        None, "zero2, zero3 gather, reduce per", unset="step"
    )
    data_bucket_bytes: Bytes = option(  # noqa: RUF009  # it makes a field, of an immutable default
        Bytes(BUCKET_BYTES), "size of gradient and parameter buckets"
    )
    tensor: int = option(1, "tensor-parallel degree: processes per layer")
    tensor_layout: Literal["1d", "2d", "2.5d", "3d"] = option("1d", "how layers are shared")
    tensor_depth: int | None = option(None, "depth of layout 2.5d", unset="none")
    sequence: bool = option(False, "Megatron's sequence parallelism, with layout 1d")
    context: int = option(1, "context-parallel degree: processes per sequence")
    context_kind: Literal["ring", "ring-plain", "ring-self-attention", "ulysses"] = option("ring", "kind")
    expert: int = option(1, "expert-parallel degree: processes per set of experts")
    expert_axes: Literal["data", "context", "data,context"] = option("data", "axes of experts")
    expert_exchange: Literal["counts", "capacity"] = option("counts", "how tokens are sent to experts")
    auto: bool = option(False, "plan for the processes of the run; also --parallel auto")
    order: str = option("dp,pp", "mesh axes, outermost first; unnamed cp, tp are last", value="AXES")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    size: int = option(32, "global batch size in samples")
    microbatches: int | None = option(None, "micro-batches per replica per step", unset="up to 8; pipedream: 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    dtype: Literal["fp32", "bf16", "fp16"] = option("fp32", "number format of parameters")
    gradients: Literal["float32", "same"] = option("float32", "accumulation format of gradients")
    loss_scale: float = option(65536.0, "initial loss scale of fp16; halved on overflow")
    loss_scale_steps: int = option(2000, "overflow-free steps before the scale doubles")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adamw", "adam", "sgd", "momentum", "lion", "adafactor", "muon"] = option("adamw", "optimizer")
    learning_rate: float = option(2e-3, "peak learning rate")
    warmup_steps: int = option(20, "steps of linear warm-up")
    min_learning_rate_fraction: float = option(0.1, "final learning rate as a fraction of the peak")
    weight_decay: float = option(0.1, "weight decay of matrices; vectors have none")
    beta1: float = option(0.9, "first-moment decay of adamw, adam, lion and muon")
    beta2: float = option(0.95, "second-moment decay of adamw, adam and muon; momentum decay of lion")
    momentum: float = option(0.95, "momentum of the optimizers momentum and muon")
    nesterov: bool = option(True, "Nesterov momentum of the optimizers momentum and muon")
    muon_learning_rate: float = option(0.02, "peak learning rate of muon's matrices")
    clip_norm: float = option(1.0, "maximum gradient norm; 0: no clipping")
    barrier: bool = option(True, "update after the global norm is known; false: before it")
    staleness: str = option("none", "learning-rate correction: none, inverse, pipemare:STEPS", value="NAME")
    replica_scaling: bool = option(False, "scale a stage's learning rate by its number of replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    cap: Bytes | None = option(  # noqa: RUF009
        None, "limit of peak memory per rank; sets recomputation", unset="no limit"
    )
    recompute: str = option("none", "activation recomputation: none, selective, full", value="NAME")
    offload: str | None = option(None, "offload target: cpu or disk:PATH", value="TARGET", unset="no offload")
    offload_states: bool = option(True, "with memory.offload: offload optimizer states")
    offload_parameters: bool = option(False, "with memory.offload: offload zero3 and main parameters")
    offload_activations: int | None = option(None, "live activations kept per rank; 0: as few as possible", unset="all")
