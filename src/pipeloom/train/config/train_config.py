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

from pipeloom.common.quantities import Bytes
from pipeloom.errors import InputError
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.parallel import DataParallel, MeshShape, Precision
from pipeloom.train.config.sections import (
    BatchConfig,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    option,
)

OWN_CHECKPOINT = ("latest", "auto")  # resume_from_checkpoint: one of the run's own output directory


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
    schedule: str = option(
        "auto", "auto: 1f1b, or seq1f1b with slices; see `pipeloom schedules`; or mine.csv, mine.json, mine.py:function"
    )
    weights: Literal["stash", "vertical"] | None = option(
        None,
        "pipedream: which weights a micro-batch sees; stash (the default): each stage's newest; vertical: those of the "
        "input stage's version when it entered",
    )
    plan: str | None = option(
        None,
        "plan.json of a planning command (--out): sets schedule, parallel, memory, precision and batch options; other "
        "values given for these options are refused",
    )
    steps: int = option(200, "optimizer steps")
    seed: int = option(0, "seed of weights, order of samples, dropout and sampling")
    output_dir: str = option("runs/train", "where metrics, report and checkpoints go")
    save_steps: int = option(100, "steps between checkpoints, one at the end too; 0: none")
    save_total_limit: int | None = option(3, "how many checkpoints are kept; null: all")
    resume_from_checkpoint: str | None = option(
        None, "checkpoint directory; latest: that of output_dir; auto: latest where there is one, else the beginning"
    )
    eval_steps: int = option(50, "steps between evaluations, one at the end too; 0: none")
    eval_batches: int = option(4, "batches an evaluation")
    log_steps: int = option(10, "steps between lines where the output is no terminal")
    sample_tokens: int = option(200, "length of the text generated at the end; 0: none")
    sample_prompt: str = option("def ", "how the generated text begins")
    sample_temperature: float = option(0.8, "temperature of the generated text; 0: the likeliest token")
    local: bool = option(False, "all ranks in this one process, one after another")

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

    def gpt(self, vocabulary_size: int) -> GPTConfig:
        """The sizes of the model. Raises InputError where they do not fit each other."""
        return GPTConfig(vocabulary_size=vocabulary_size, **dataclasses.asdict(self.model))

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
