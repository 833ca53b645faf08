"""`TrainConfig`: one training run, as read from command line, environment, YAML file and plan. No torch.

Every field is an option (``--model.layers 6``), an environment variable (``PIPELOOM_MODEL__LAYERS=6``) and a key of a
YAML file (``model: {layers: 6}``). `pipeloom.cli.common.train_options` reads them.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args, get_type_hints

from pipeloom.common.quantities import Bytes
from pipeloom.errors import InputError
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.parallel import DataParallel, MeshShape, Precision
from pipeloom.plan.memory.state_bytes import NEED_FULL_MATRICES
from pipeloom.train.config.model_directory import DEFAULT_LENGTH, ModelFacts, default_length, model_facts
from pipeloom.train.config.sections import (
    BatchConfig,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    ModelSizes,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    option,
)

AUTO = "auto"  # value of an option that the run chooses by measuring


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
    schedule: str | None = option(
        None, "schedule name, auto, or a file", value="NAME", unset="1f1b; seq1f1b with slices", group="parallel"
    )
    weights: Literal["stash", "vertical"] | None = option(
        None, "weight versioning of pipedream", unset="stash", group="parallel"
    )
    plan: str | None = option(
        None, "plan file written with --out; sets the options in it", value="FILE", unset="none", group="parallel"
    )
    processes: int | None = option(
        None, "processes of --parallel auto", unset="torchrun's, or the cores", group="parallel"
    )
    replan: bool = option(False, "with --parallel auto: plan again at each checkpoint", group="parallel")
    steps: int = option(200, "number of optimizer steps", group="batch")
    seed: int = option(0, "seed of weights, sample order, dropout and sampling", group="data")
    output_dir: str = option("runs/train", "directory of metrics, report and checkpoints", value="DIR", group="output")
    save_steps: int = option(100, "steps between checkpoints; 0: none", group="output")
    save_total_limit: int | None = option(3, "checkpoints kept; null: all", group="output")
    background_saves: bool = option(False, "write checkpoints while training goes on", group="output")
    save_errors: int = option(3, "failed background saves in a row that a run survives", group="output")
    resume_from_checkpoint: str | None = option(
        None, "checkpoint directory, latest or auto", value="DIR", unset="a new run", group="output"
    )
    checkpoint_key_file: str | None = option(
        None, "key that signs checkpoints", value="FILE", unset="no signatures", group="output"
    )
    eval_steps: int = option(50, "steps between evaluations; 0: none", group="output")
    eval_batches: int = option(4, "batches per evaluation", group="output")
    report_to: str = option("none", "tensorboard, wandb, trackio: where metrics also go", value="NAMES", group="output")
    log_steps: int = option(10, "steps between log lines if output is not a terminal", group="output")
    sample_tokens: int = option(200, "tokens generated at the end; 0: none", group="output")
    sample_prompt: str = option("def ", "prompt of the generated text", group="output")
    sample_temperature: float = option(0.8, "sampling temperature; 0: greedy", group="output")
    recover: bool = option(False, "start killed ranks again, from copies in memory", group="faults")
    copy_steps: int = option(10, "steps between copies for --recover, --elastic; 0: none", group="faults")
    max_recoveries: int = option(3, "most recoveries of a run", group="faults")
    spare: int = option(0, "must be 0: all ranks are forked from one process", group="faults")
    elastic: bool = option(False, "go on with fewer ranks when one is lost", group="faults")
    reroute: bool = option(False, "peers compute a lost rank's micro-batches", group="faults")
    min_ranks: int = option(1, "fewest ranks with which --elastic goes on", group="faults")
    max_ranks: int | None = option(None, "most ranks of --elastic", unset="those configured", group="faults")
    regrow_seconds: float = option(0.0, "wait before lost ranks rejoin; 0: for SIGUSR2", group="faults")
    preempt_seconds: float = option(30.0, "seconds to save in after SIGTERM; 0: end at once", group="faults")
    watchdog: bool = option(True, "end the run when a rank hangs; off: wait", group="faults")
    watchdog_seconds: float | None = option(
        None, "seconds without progress", unset="5 x a recent step, at least 30", group="faults"
    )
    compile: bool = option(False, "compile every block with torch.compile", group="device")
    fp8: bool = option(False, "multiply in 8 bits in the linear layers of blocks", group="device")
    graphs: bool = option(False, "on a GPU: record forwards and backwards as CUDA graphs", group="device")
    on_spike: Literal["warn", "skip", "rewind"] = option(
        "warn", "action at a spike of loss or gradient norm", group="faults"
    )
    on_nonfinite: Literal["stop", "retry"] = option(
        "stop", "action when a non-finite step is finite on a second run", group="faults"
    )
    spike_rewinds: int = option(3, "maximum rewinds to the same checkpoint", group="faults")
    local: bool = option(
        False,
        "run all ranks in this process, in turn or in threads",
        group="parallel",
    )

    def __post_init__(self) -> None:
        if self.model.sequence_length is None:
            home = self.model.pretrained
            length = DEFAULT_LENGTH if home is None else default_length(home)
            object.__setattr__(self, "model", dataclasses.replace(self.model, sequence_length=length))

    @property
    def facts(self) -> ModelFacts | None:
        """What the configuration of ``model.pretrained`` says; None: the model is a GPT. Raises as `model_facts`."""
        return None if self.model.pretrained is None else model_facts(self.model.pretrained)

    @property
    def blocks(self) -> int | None:
        """The blocks of the model; None: its configuration does not say."""
        return self.model.layers if self.facts is None else self.facts.layers

    @property
    def measures_plan(self) -> bool:
        """Whether the run measures and chooses its plan, or its schedule alone, before it trains."""
        return self.parallel.auto or self.schedule == AUTO

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per replica per step."""
        if self.batch.microbatches is not None:
            return self.batch.microbatches
        return 1 if self.schedule == "pipedream" else max(1, min(8, self.batch.size // self.data_degree))

    @property
    def reporters(self) -> tuple[str, ...]:
        """The names in `report_to`."""
        names = dict.fromkeys(name.strip() for name in self.report_to.split(","))
        return tuple(name for name in names if name != "none")

    @property
    def data_degree(self) -> int:
        """The data-parallel degree; 1 as long as -1 is not replaced by a number."""
        return max(1, self.parallel.data)

    @property
    def stage_processes(self) -> int:
        """Processes that share a stage of a replica: along mesh axes cp and tp."""
        return self.parallel.tensor * self.parallel.context

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The mesh axes whose processes share experts."""
        names = {"data": "dp", "context": "cp"}
        return tuple(names[name] for name in self.parallel.expert_axes.split(","))

    @property
    def parameter_replicas(self) -> int:
        """Processes with the same blocks of parameters: along mesh axes dp and cp."""
        return self.data_degree * self.parallel.context

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        if self.parallel.auto:
            return self.processes or 1
        return self.num_ranks * self.data_degree * self.stage_processes

    @property
    def num_threads(self) -> int:
        """Threads that act as processes: with `local`, one per rank where several share a stage; else 1."""
        return self.num_processes if self.local and self.data_degree * self.stage_processes > 1 else 1

    @property
    def transport(self) -> str:
        """The transport as a pipeline takes it."""
        return "loopback" if self.local and self.num_threads == 1 else self.parallel.transport

    @property
    def microbatch_size(self) -> int:
        """Samples of the largest micro-batch."""
        return -(-self.batch.size // (self.data_degree * self.num_microbatches))

    @property
    def data_parallel(self) -> DataParallel:
        """How replicas shard. Raises InputError where strategy and granularity do not go together."""
        whole = self.optimizer.name in NEED_FULL_MATRICES
        return DataParallel(
            self.parallel.data_strategy,
            self.parallel.data_granularity,
            "parameters" if whole else "elements",
            int(self.parallel.data_bucket_bytes),
        )

    @property
    def shared(self) -> DataParallel | None:
        """`data_parallel` where it has an effect; None for one replica whose parameters are the model's own."""
        return self.data_parallel if self.parameter_replicas > 1 or self.memory.offload_parameters else None

    @property
    def gpt_sizes(self) -> dict[str, Any]:
        """The sizes of a GPT by name."""
        return {entry.name: getattr(self.model, entry.name) for entry in dataclasses.fields(ModelSizes)}

    def gpt(self, vocabulary_size: int) -> GPTConfig:
        """The sizes of the model. Raises InputError where they do not fit each other, or the model is another one."""
        if self.model.pretrained is not None:
            raise InputError(
                f"model.pretrained={self.model.pretrained}: memory and times are predicted for pipeloom's GPT alone. "
                "Remove memory.cap, or give the sizes of a GPT in place of model.pretrained."
            )
        return GPTConfig(vocabulary_size=vocabulary_size, **self.gpt_sizes)

    @property
    def number_format(self) -> Precision:
        """``precision``, as a pipeline takes it."""
        return Precision(self.precision.dtype, self.precision.gradients)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Ranks per stage: ``parallel.replicas``, else one each.

        Raises:
            InputError: ``parallel.replicas`` is malformed, or has another number of stages.
        """
        asked, stages = self.parallel.replicas, self.parallel.pipeline
        if asked is None:
            return (1,) * stages
        found = whole_numbers(asked)
        if not all(found):
            raise InputError(f"parallel.replicas={asked}: must be ranks per stage, such as 2,1.")
        if len(found) != stages:
            raise InputError(
                f"parallel.replicas={asked}: must have one number for each of {stages} stages. Use --parallel.pipeline "
                f"{len(found)}, or other replicas."
            )
        return found

    @property
    def num_ranks(self) -> int:
        """Ranks per replica of the pipeline."""
        return sum(self.replicas)

    @property
    def has_peers(self) -> bool:
        """Whether several ranks hold a stage: those of data-parallel replicas, or of ``parallel.replicas``."""
        return self.data_degree > 1 or max(self.replicas) > 1

    def mesh_shape(self, num_processes: int | None = None) -> MeshShape:
        """The process mesh; axes cp and tp are innermost unless ``parallel.order`` names them.

        Raises:
            InputError: ``parallel.order`` is malformed, or the degrees do not make up the processes.
        """
        order = tuple(axis.strip() for axis in self.parallel.order.split(","))
        if not {"dp", "pp"} <= set(order) <= {"dp", "pp", "cp", "tp"} or len(set(order)) < len(order):
            raise InputError(
                f"parallel.order={self.parallel.order}: must be dp,pp or pp,dp, with cp and tp in any place."
            )
        order = (*order, *(axis for axis in ("cp", "tp") if axis not in order))
        degrees = {
            "pp": self.num_ranks,
            "dp": self.parallel.data,
            "cp": self.parallel.context,
            "tp": self.parallel.tensor,
        }
        return MeshShape.of(
            degrees,
            num_processes=num_processes,
            order=order,
            ep=self.parallel.expert,
            expert_axes=self.expert_axes,
        )

    def changed(self, section: str, **values: Any) -> Self:
        """A copy with other values in a section."""
        return dataclasses.replace(self, **{section: dataclasses.replace(getattr(self, section), **values)})

    def to_json(self) -> str:
        """All values as one JSON text, paths with every byte; `from_json` is its inverse."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_mapping(json.loads(text))

    def to_mapping(self) -> dict[str, Any]:
        """Nested plain values, for YAML and JSON."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """The inverse of `to_mapping`; missing keys take their defaults."""
        made: Self = _from_mapping(cls, mapping)
        return made


def _from_mapping(kind: Any, mapping: Mapping[str, Any]) -> Any:
    hints = get_type_hints(kind)

    def value_of(hint: Any, value: Any) -> Any:
        if dataclasses.is_dataclass(hint):
            return _from_mapping(hint, value)
        return Bytes.parse(value) if value is not None and Bytes in (hint, *get_args(hint)) else value

    return kind(**{key: value_of(hints[key], value) for key, value in mapping.items()})


def whole_numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list such as ``5,3``; (0,) if one is malformed or too long."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(map(int, parts)) if all(part.isdecimal() and len(part) < 20 for part in parts) else (0,)


def flat(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf of a nested mapping: ``("steps", 9)``, ``("model.layers", 6)``."""
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def as_utf8(text: str) -> str:
    """`text` of a command line: bytes that the locale could not read are taken for UTF-8, which files hold."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.written if isinstance(value, Bytes) else as_utf8(value) if isinstance(value, str) else value
