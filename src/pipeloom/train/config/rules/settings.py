"""Validates the options of a run, without its machine and its data. No torch.

Every message is ``option=value: rule. Fix.`` on one line.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

from pipeloom.data.files import weighted_paths
from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.ir.recompute import recompute_of_stages
from pipeloom.parallel.options import OffloadTarget, check_synchronous
from pipeloom.passes import lower
from pipeloom.train.config.experts import check_experts
from pipeloom.train.config.fine_tuning import check_fine_tuning
from pipeloom.train.config.inside_stage import check_inside_stage
from pipeloom.train.config.memory import activation_offload, check_background_saves
from pipeloom.train.config.rules.faults import check_recovery, check_spikes
from pipeloom.train.config.rules.streams import check_stream_options
from pipeloom.train.config.rules.unused import check_unused, word_of
from pipeloom.train.config.schedule import make_schedule, parse_cut
from pipeloom.train.config.train_config import TrainConfig, flat
from pipeloom.train.elastic.options import check_elastic

_REPORTERS = ("tensorboard", "wandb", "trackio")
_AT_LEAST_1 = (
    *("batch.microbatches", "batch.size", "parallel.pipeline", "parallel.data", "model.layers", "model.width"),
    *("parallel.tensor", "parallel.tensor_depth", "parallel.context", "parallel.expert"),
    *("model.heads", "model.kv_heads", "model.sequence_length", "eval_batches", "log_steps", "save_total_limit"),
    *("precision.loss_scale_steps", "model.lora", "spike_rewinds", "max_recoveries", "data.workers"),
    *("min_ranks", "max_ranks"),
)
_AT_LEAST_0 = (
    *("steps", "seed", "save_steps", "save_errors", "copy_steps", "spare", "eval_steps", "sample_tokens"),
    "optimizer.warmup_steps",
)
_RATES = (
    *("optimizer.learning_rate", "optimizer.weight_decay", "optimizer.clip_norm", "optimizer.muon_learning_rate"),
    *("sample_temperature", "preempt_seconds", "regrow_seconds"),
)
_FRACTIONS = ("optimizer.beta1", "optimizer.beta2", "optimizer.momentum", "model.dropout", "data.validation_fraction")
_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (_AT_LEAST_1, lambda value: value >= 1, "at least 1"),
    (_AT_LEAST_0, lambda value: value >= 0, "at least 0"),
    (("seed",), lambda value: value < 2**64, "below 2**64"),
    (_RATES, lambda value: 0 <= value < math.inf, "finite and at least 0"),
    (_FRACTIONS, lambda value: 0 <= value < 1, "at least 0 and below 1"),
    (("optimizer.min_learning_rate_fraction",), lambda value: 0 <= value <= 1, "from 0 to 1"),
    (("watchdog_seconds",), lambda value: 0 < value < math.inf, "finite and above 0"),
    (("precision.loss_scale",), lambda value: 1 <= value < math.inf, "finite and at least 1"),
)


def check_optimizer(config: TrainConfig) -> None:
    """Raises InputError for Adafactor where ranks divide parameters: its sums are those of full matrices."""
    parallel = config.parallel
    for name in ("tensor", "expert") if config.optimizer.name == "adafactor" else ():
        if (degree := getattr(parallel, name)) > 1:
            raise InputError(
                f"optimizer.name=adafactor: does not work with parallel.{name}={degree}: its row and column sums need "
                f"full parameters, which the ranks divide. Use adamw, lion or muon, or parallel.{name} 1."
            )


def _check_reporters(config: TrainConfig) -> None:
    for name in config.reporters:
        if name not in _REPORTERS:
            raise InputError(f"report_to={config.report_to!r}: must be names of {', '.join(_REPORTERS)}, or none.")
        if find_spec(name) is None:
            raise InputError(f"report_to={name}: {name} is not installed. Run pip install 'pipeloom[{name}]'.")


def validate_settings(config: TrainConfig) -> None:
    """Validate that options are in range, do not contradict each other and have an effect.

    Raises:
        InputError: the first of them.
    """
    check_sizes(config)
    if config.output_dir == "null":
        raise InputError("output_dir=null: must be a directory. Write ./null for a directory of this name.")
    if config.local and config.parallel.transport != "auto":
        raise InputError(
            f"parallel.transport={config.parallel.transport}: has no effect with --local, which sends no messages. "
            "Remove parallel.transport, or --local."
        )
    if config.num_threads > 1 and config.model.dropout > 0:
        raise InputError(
            f"model.dropout={config.model.dropout}: with --local and several ranks per stage, threads draw from one "
            "random generator. Remove model.dropout, or --local."
        )
    _check_data_paths(config)
    _check_reporters(config)
    check_optimizer(config)
    if config.facts is not None:
        check_fine_tuning(config, config.facts)
    schedule = make_schedule(config)
    parse_cut(config, schedule.num_stages)
    check_stream_options(config, schedule)
    check_spikes(config, schedule)
    check_experts(config, schedule)
    check_inside_stage(config, schedule)
    _check_data_parallel(config, schedule)
    _check_memory(config, schedule)
    check_background_saves(config)
    _check_graphs(config, schedule)
    check_recovery(config)
    check_elastic(config, schedule)
    check_unused(config)


def _check_data_paths(config: TrainConfig) -> None:
    if config.data.mixture is None:
        return
    if config.data.path is not None:
        raise InputError(
            f"data.mixture={config.data.mixture} with data.path={config.data.path}: a mixture names all paths. Remove "
            "one of them."
        )
    weighted_paths(config.data.mixture)


def _check_graphs(config: TrainConfig, schedule: Schedule) -> None:
    found = {
        f"schedule={config.schedule}": schedule.microbatches_per_update is not None,
        f"parallel.slices={config.parallel.slices}": schedule.num_slices > 1,
        f"parallel.data={config.parallel.data}": config.num_processes > schedule.num_ranks,
        f"precision.dtype={config.precision.dtype}": config.precision.dtype != "fp32",
        f"memory.offload={config.memory.offload}": config.memory.offload is not None,
    }
    if config.graphs and (other := next((name for name, is_so in found.items() if is_so), None)) is not None:
        raise InputError(
            f"graphs=true with {other}: forwards and backwards are recorded where one process computes a whole stage "
            "of whole micro-batches with the model's own parameters. Remove one of them."
        )


def check_sizes(config: TrainConfig) -> None:
    """Validate numbers, and that the model and the batch can be divided as configured."""
    values = dict(flat(dataclasses.asdict(config))) | {"batch.microbatches": config.num_microbatches}
    for keys, fits, rule in _RANGES:
        for key in keys:
            unset = values[key] is None or (key, values[key]) == ("parallel.data", -1)
            if not unset and not fits(values[key]):
                raise InputError(f"{key}={values[key]}: must be {rule}.")
    needed = config.data_degree * config.num_microbatches
    if config.batch.size < needed:
        raise InputError(
            f"batch.size={config.batch.size}: {needs_samples(config)}. Raise batch.size to {needed}, or lower "
            "batch.microbatches."
        )
    if config.model.pretrained is not None:
        return
    if config.parallel.pipeline > config.model.layers:
        raise InputError(
            f"parallel.pipeline={config.parallel.pipeline}: each stage needs a block, and model.layers="
            f"{config.model.layers}. Lower parallel.pipeline, or raise model.layers."
        )
    config.gpt(vocabulary_size=1)  # its sizes fit each other, or it says which do not; the data is not read yet


def needs_samples(config: TrainConfig) -> str:
    """The rule that a batch has a sample for each micro-batch, for messages."""
    of_replicas = f" of each of {config.data_degree} replicas" if config.data_degree > 1 else ""
    return f"each of {config.num_microbatches} micro-batches{of_replicas} needs a sample"


def _check_data_parallel(config: TrainConfig, schedule: Schedule) -> None:
    """Validate combinations with data-parallel replicas, 16-bit formats and offloaded parameters."""
    degree, dtype = config.data_degree, config.precision.dtype
    config.data_parallel  # noqa: B018  # a granularity that the strategy does not have
    config.number_format  # noqa: B018  # gradients that the format does not have
    config.mesh_shape(config.num_processes * config.parallel.expert if config.parallel.data == -1 else None)
    unusual = f"precision.dtype={dtype}"
    if config.shared is not None and degree * config.parallel.context > 1:
        unusual = f"parallel.data={degree}" if degree > 1 else f"parallel.context={config.parallel.context}"
    elif config.shared is not None:
        unusual = "memory.offload_parameters=true"
    if config.shared is None and dtype == "fp32":
        return
    check_synchronous(schedule, unusual)
    if not config.optimizer.barrier:
        raise InputError(
            f"optimizer.barrier=false: does not work with {unusual}: updates without a barrier support neither "
            "data-parallel replicas, 16-bit formats nor offloaded parameters. Remove optimizer.barrier, or "
            f"{unusual.partition('=')[0]}."
        )


def _check_memory(config: TrainConfig, schedule: Schedule) -> None:
    """Validate that offload has a target, and its combinations."""
    memory = config.memory
    recompute_of_stages(memory.recompute, schedule.num_stages)
    if memory.offload is None:
        for name in ("offload_activations", "offload_parameters"):
            value = getattr(memory, name)
            if value is not None and value is not False:  # 0 activations is a value
                raise InputError(
                    f"memory.{name}={word_of(value)}: no offload target is configured. Add --memory.offload cpu or "
                    "disk:PATH."
                )
        return
    OffloadTarget.parse(memory.offload)
    if memory.offload_parameters:
        data = replace(config.data_parallel, offload=memory.offload)
        if not data.kind.shards_parameters and not config.number_format.has_masters:
            raise InputError(
                f"memory.offload_parameters=true: with {data.strategy} in fp32, every forward reads the parameters. "
                "Use --parallel.data_strategy zero3, or --precision.dtype bf16 or fp16, or remove "
                "memory.offload_parameters."
            )
    if memory.offload_states and not config.optimizer.barrier:
        raise InputError(
            "optimizer.barrier=false: does not work with offloaded optimizer states, which an update may have to "
            "restore. Remove it, or use --memory.offload_states false."
        )
    if memory.offload_activations is not None and memory.offload_activations < 0:
        raise InputError(
            f"memory.offload_activations={memory.offload_activations}: must be at least 0; 0 keeps as few as possible."
        )
    if (offload := activation_offload(config)) is not None:
        offload.insert(lower(schedule))
