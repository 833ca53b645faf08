"""The configuration of a training run: what `pipeloom train` takes as flags, environment variables and YAML.

Every field is a flag (``--model.layers 6``), an environment variable (``PIPELOOM_MODEL__LAYERS=6``) and a key of a YAML
file (``model: {layers: 6}``, given by ``--config``). A file counts less than the environment, the environment less than
a flag. No torch here: the launcher reads and checks a configuration without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from pipeloom.errors import InputError
from pipeloom.parallel import DataParallel, MeshShape, Precision
from pipeloom.parallel.options import BUCKET_BYTES
from pipeloom.words import Bytes


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    path: str | None = _option(None, "directory, file or glob of text; left out: the .py files of Python's library")
    tokenizer: str | None = _option(None, "tokenizer.json of the tokenizers library; left out: bytes, vocabulary 256")
    validation_fraction: float = _option(0.05, "share of the files that is held out for evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    layers: int = _option(6, "number of transformer blocks")
    width: int = _option(192, "size of the residual stream")
    heads: int = _option(6, "number of attention heads; divides the width")
    sequence_length: int = _option(128, "tokens a sample")
    tie_embeddings: bool = _option(False, "one matrix for the embedding and the output head")
    positions: Literal["rotary", "learned"] = _option("rotary", "how positions enter")
    dropout: float = _option(0.0, "dropout probability")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    pipeline: int = _option(2, "number of ranks of the pipeline; of stages where parallel.replicas is given")
    replicas: str | None = _option(
        None, "ranks of each stage, such as 2,1, for pipedream and pipedream-2bw; left out: one each"
    )
    in_flight: Literal["noam", "full"] = _option(
        "noam", "micro-batches in flight with replicas: as PipeDream has it, or what the full period needs"
    )
    chunks: int | None = _option(None, "stages a rank; left out: the schedule's own number")
    cut: str = _option("layers", "where stages begin: layers, parameters, time, or blocks a stage such as 5,3")
    slices: int | str | None = _option(
        None, "cut every sequence: a number, lengths such as 1600,1344,1152, or auto: measured here; left out: whole"
    )
    transport: Literal["auto", "shared-memory", "torch"] = _option("auto", "how messages travel between ranks")
    data: int = _option(
        1,
        "copies of the pipeline, each with samples of its own; each has parallel.pipeline processes; -1 under "
        "torchrun: as many as its processes make",
    )
    data_strategy: Literal["ddp", "parameter-server", "zero1", "zero2", "zero3"] = _option(
        "ddp",
        "what a copy keeps: ddp all, parameter-server and zero1 all but optimizer states, zero2 a share of gradients "
        "too, zero3 a share of parameters too",
    )
    data_granularity: Literal["step", "chunk", "microbatch"] | None = _option(
        None,
        "how often zero3 gathers parameters, and zero2 and zero3 share gradients: each needs less memory than the one "
        "before, and communicates more; left out: once a step",
    )
    data_bucket_bytes: Bytes = _option(  # noqa: RUF009  # it makes a field, of an immutable default
        Bytes(BUCKET_BYTES),
        "parameters of so many bytes are gathered and summed together: more is fewer messages, less is more of them "
        "beside computations",
    )
    order: str = _option("dp,pp", "axis whose neighbours stand farthest apart, then the others: dp,pp or pp,dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    size: int = _option(32, "samples a step, over all micro-batches of all copies")
    microbatches: int | None = _option(
        None,
        "micro-batches a step of each copy of the pipeline; left out: 8, or one a sample where there are fewer; "
        "pipedream: 1",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    dtype: Literal["fp32", "bf16", "fp16"] = _option(
        "fp32", "format of parameters in forwards and backwards, and of messages; updates are of float32 numbers"
    )
    gradients: Literal["float32", "same"] = _option(
        "float32", "format in which gradients of micro-batches add up; same: that of the parameters"
    )
    loss_scale: float = _option(65536.0, "fp16: factor of the first step's loss; overflows halve it")
    loss_scale_steps: int = _option(2000, "fp16: after so many steps without overflow the factor doubles")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adamw", "adam", "sgd", "momentum", "muon"] = _option(
        "adamw", "muon: matrices of the blocks by Muon, all else by AdamW"
    )
    learning_rate: float = _option(2e-3, "largest learning rate; of muon that of AdamW, and see muon_learning_rate")
    warmup_steps: int = _option(20, "steps of linear warm-up")
    min_learning_rate_fraction: float = _option(0.1, "learning rate at the last step, as a fraction of the largest")
    weight_decay: float = _option(
        0.1, "weight decay of matrices; vectors have none; adam, sgd and momentum add it to the gradient"
    )
    beta1: float = _option(0.9, "adamw, adam, muon: decay of the first moment")
    beta2: float = _option(0.95, "adamw, adam, muon: decay of the second moment")
    momentum: float = _option(0.95, "momentum, muon: decay of the sum of gradients")
    nesterov: bool = _option(True, "momentum, muon: look ahead by one step")
    muon_learning_rate: float = _option(0.02, "muon: largest learning rate of the matrices that it updates")
    clip_norm: float = _option(
        1.0,
        "largest gradient norm over all stages; in a stream (pipedream) of each stage by itself, over the root of "
        "their number; 0: no clipping",
    )
    barrier: bool = _option(
        True, "ranks wait for the norm of all before they update; false: they go on at once and validate later"
    )
    staleness: str = _option(
        "none",
        "what pipedream and pipedream-2bw do to the learning rate of gradients that are late: none, inverse, "
        "or pipemare:K over the first K steps",
    )
    replica_scaling: bool = _option(
        False,
        "pipedream with replicas: learning rate of a stage times the batches of its update over the first stage's",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    cap: Bytes | None = _option(  # noqa: RUF009
        None,
        "most bytes that a rank may hold, such as 16GiB, as `pipeloom memory` counts them: recompute and "
        "parallel.data_granularity are then chosen",
    )
    recompute: str = _option(
        "none",
        "what backwards compute again instead of keeping it: none, selective (attention), full (every block), or one "
        "word a stage such as full,none",
    )
    offload: str | None = _option(None, "where to what is not needed at once: cpu, or disk:PATH; left out: nowhere")
    offload_states: bool = _option(True, "with offload: optimizer states go there")
    offload_parameters: bool = _option(
        False,
        "with offload: parameters of zero3, also of one copy, and float32 masters of bf16 and fp16 go there between "
        "updates",
    )
    offload_activations: int | None = _option(
        None,
        "with offload: how many activations a rank keeps, others go there; 0: as few as moves can keep; left out: all",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run; `to_mapping` and `from_mapping` go to nested YAML and back."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    schedule: str = _option(
        "auto", "auto: 1f1b, or seq1f1b with slices; see `pipeloom schedules`; or mine.csv, mine.json, mine.py:function"
    )
    weights: Literal["stash", "vertical"] | None = _option(
        None,
        "pipedream: which weights a micro-batch sees; stash (the default): each stage's newest; vertical: those of the "
        "input stage's version when it entered",
    )
    steps: int = _option(200, "optimizer steps")
    seed: int = _option(0, "seed of weights, order of samples, dropout and sampling")
    output_dir: str = _option("runs/train", "where metrics, report and checkpoints go")
    save_steps: int = _option(100, "steps between checkpoints, one at the end too; 0: none")
    save_total_limit: int | None = _option(3, "how many checkpoints are kept; null: all")
    resume_from_checkpoint: str | None = _option(None, "checkpoint directory, or latest: that of output_dir")
    eval_steps: int = _option(50, "steps between evaluations, one at the end too; 0: none")
    eval_batches: int = _option(4, "batches an evaluation")
    log_steps: int = _option(10, "steps between lines where the output is no terminal")
    sample_tokens: int = _option(200, "length of the text generated at the end; 0: none")
    sample_prompt: str = _option("def ", "how the generated text begins")
    sample_temperature: float = _option(0.8, "temperature of the generated text; 0: the likeliest token")
    local: bool = _option(False, "all ranks in this one process, one after another")

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step, of one copy of the pipeline."""
        if self.batch.microbatches is not None:
            return self.batch.microbatches
        return 1 if self.schedule == "pipedream" else max(1, min(8, self.batch.size // self.num_copies))

    @property
    def num_copies(self) -> int:
        """Copies of the pipeline; one as long as -1 is not replaced by a number."""
        return max(1, self.parallel.data)

    @property
    def samples_a_microbatch(self) -> int:
        """The most that one of them has."""
        return -(-self.batch.size // (self.num_copies * self.num_microbatches))

    @property
    def data_parallel(self) -> DataParallel:
        """What the copies share. Raises InputError where strategy and granularity do not go together."""
        whole = self.optimizer.name == "muon"  # it needs matrices in one piece
        return DataParallel(
            self.parallel.data_strategy,
            self.parallel.data_granularity,
            "parameters" if whole else "elements",
            int(self.parallel.data_bucket_bytes),
        )

    @property
    def shared(self) -> DataParallel | None:
        """`data_parallel` where it means anything; None for one copy whose parameters are the model's own."""
        return self.data_parallel if self.num_copies > 1 or self.memory.offload_parameters else None

    @property
    def number_format(self) -> Precision:
        """``precision``, as a pipeline takes it."""
        return Precision(self.precision.dtype, self.precision.gradients)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Ranks of each stage where that was asked for, else one for each rank of the pipeline.

        Raises:
            InputError: ``parallel.replicas`` is no list of numbers, or not one for each stage.
        """
        asked, stages = self.parallel.replicas, self.parallel.pipeline
        if asked is None:
            return (1,) * stages
        parts = asked.split(",")
        if not all(part.strip().isdecimal() and len(part) < 20 and int(part) for part in parts):
            raise InputError(f"parallel.replicas is {asked!r}: it is the ranks of each stage, such as 2,1; correct it")
        if len(parts) != stages:
            raise InputError(
                f"parallel.replicas is {asked} for {stages} stages: each stage has a number; give --parallel.pipeline "
                f"{len(parts)}, or other replicas"
            )
        return tuple(map(int, parts))

    @property
    def num_ranks(self) -> int:
        """Ranks of one copy of the pipeline."""
        return sum(self.replicas)

    def mesh_shape(self, num_processes: int | None = None) -> MeshShape:
        """Where processes stand on the axes pp and dp.

        Raises:
            InputError: ``parallel.order`` is none, or the numbers do not make up the processes.
        """
        order = tuple(axis.strip() for axis in self.parallel.order.split(","))
        if sorted(order) != ["dp", "pp"]:
            raise InputError(
                f"parallel.order is {self.parallel.order!r}: it is dp,pp (the default: ranks of one copy are "
                "neighbours) or pp,dp; choose one"
            )
        degrees = {"pp": self.num_ranks, "dp": self.parallel.data}
        return MeshShape.of(degrees, num_processes=num_processes, order=order)

    def to_mapping(self) -> dict[str, Any]:
        """Nested plain values, for YAML and JSON."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_mapping`; missing keys take their defaults."""
        made: TrainConfig = _from_mapping(cls, mapping)
        return made


def _from_mapping(kind: Any, mapping: Mapping[str, Any]) -> Any:
    hints = get_type_hints(kind)

    def value_of(hint: Any, value: Any) -> Any:
        if dataclasses.is_dataclass(hint):
            return _from_mapping(hint, value)
        return Bytes.parse(value) if value is not None and Bytes in (hint, *get_args(hint)) else value

    return kind(**{key: value_of(hints[key], value) for key, value in mapping.items()})


def as_utf8(text: str) -> str:
    """`text` of a command line: bytes that the locale could not read are taken for UTF-8, which files hold."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.written if isinstance(value, Bytes) else as_utf8(value) if isinstance(value, str) else value


def options() -> Iterator[tuple[str, Any, Any, str]]:
    """(dotted key, type, default, help) of every field, in order of declaration."""
    yield from _options_of(TrainConfig, "")


def _options_of(kind: Any, prefix: str) -> Iterator[tuple[str, Any, Any, str]]:
    hints = get_type_hints(kind)
    for entry in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[entry.name]):
            yield from _options_of(hints[entry.name], f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, hints[entry.name], entry.default, entry.metadata["help"]
