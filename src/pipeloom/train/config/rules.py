"""Validates the options of a run, without its machine and its data. No torch.

Every message is ``option=value: rule. Fix.`` on one line.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from pipeloom.data.files import weighted_paths
from pipeloom.errors import InputError
from pipeloom.ir import DataStrategy, Schedule
from pipeloom.ir.recompute import recompute_of_stages
from pipeloom.parallel.options import OffloadTarget, check_synchronous
from pipeloom.passes import lower
from pipeloom.train.config.experts import check_experts
from pipeloom.train.config.fine_tuning import check_fine_tuning
from pipeloom.train.config.inside_stage import check_inside_stage
from pipeloom.train.config.memory import activation_offload, check_background_saves
from pipeloom.train.config.schedule import AUTO, make_schedule, parse_cut, unused_data_options
from pipeloom.train.config.train_config import TrainConfig, flat
from pipeloom.train.elastic.options import check_elastic

DRAINS = ("steps", "eval_steps", "save_steps")  # a stream drains there, so all stages must have updated
_REPORTERS = ("tensorboard", "wandb", "trackio")
STALENESS = ("none", "inverse", "pipemare")
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
_USERS = {  # optimizers that an option is for
    "beta1": ("adamw", "adam", "lion", "muon"),
    "beta2": ("adamw", "adam", "lion", "muon"),
    "momentum": ("momentum", "muon"),
    "nesterov": ("momentum", "muon"),
    "muon_learning_rate": ("muon",),
}


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
    _check_stream_options(config, schedule)
    _check_spikes(config, schedule)
    check_experts(config, schedule)
    check_inside_stage(config, schedule)
    _check_data_parallel(config, schedule)
    _check_memory(config, schedule)
    check_background_saves(config)
    _check_graphs(config, schedule)
    _check_recovery(config)
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


def _check_recovery(config: TrainConfig) -> None:
    """Raises InputError where processes could not be replaced, or ranks that start again would measure another cut."""
    measured = {
        "parallel.auto=true": config.parallel.auto,
        "parallel.cut=time": config.parallel.cut == "time",
        f"parallel.slices={AUTO}": config.parallel.slices == AUTO,
    }
    if not config.recover:
        return
    if config.spare and config.elastic:
        raise InputError(
            f"spare={config.spare}: waiting processes belong to a layout, and --elastic changes it. Remove one of them."
        )
    if config.local:
        raise InputError("recover=true: with --local, one process holds all ranks. Remove one of them.")
    if (name := next((name for name, is_so in measured.items() if is_so), None)) is not None:
        raise InputError(
            f"recover=true: {name} is measured again by ranks that start again, and could differ. Name the values, or "
            "remove --recover."
        )


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
            "of whole micro-batches with the model's own parameters. Leave one of the two out."
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


# Combinations


def staleness(config: TrainConfig) -> tuple[str, int | None]:
    """``optimizer.staleness`` as a kind of discount and, for pipemare, its number of steps.

    Raises:
        InputError: it is malformed.
    """
    kind, _, steps = config.optimizer.staleness.partition(":")
    counted = steps.isdecimal() and int(steps) > 0
    if kind not in STALENESS or (kind == "pipemare") is not counted or (steps and not counted):
        raise InputError(
            f"optimizer.staleness={config.optimizer.staleness}: must be none, inverse, or pipemare:K with a number of "
            "steps."
        )
    return kind, int(steps) if counted else None


def _check_stream_options(config: TrainConfig, schedule: Schedule) -> None:
    """Validate options of asynchronous schedules, and that a stream can drain at the steps that need it."""
    kind, _ = staleness(config)
    if schedule.microbatches_per_update is not None:
        check_stream(config)
        return
    has_no_effect = f"has no effect with schedule {schedule.name!r}"
    if config.parallel.in_flight != "noam":
        raise InputError(
            f"parallel.in_flight={config.parallel.in_flight}: {has_no_effect}, which is synchronous. Remove it, or use "
            "pipedream."
        )
    if kind != "none" or config.optimizer.replica_scaling:
        name = "staleness" if kind != "none" else "replica_scaling"
        value = _word(getattr(config.optimizer, name))
        raise InputError(
            f"optimizer.{name}={value}: {has_no_effect}: a synchronous schedule has no stale gradients and no "
            "replicated stages. Remove it, or use pipedream."
        )


def check_stream(config: TrainConfig) -> None:
    """Validate options that no asynchronous schedule supports, before one is made.

    Raises:
        InputError: the first option.
    """
    name = config.schedule
    if not config.optimizer.barrier:
        raise InputError(
            f"optimizer.barrier=false: has no effect with schedule {name!r}, which has no barrier. Remove it."
        )
    if config.model.tie_embeddings and config.parallel.pipeline > 1:
        raise InputError(
            f"model.tie_embeddings=true: does not work with schedule {name!r}, whose first and last stage update at "
            "different times. Remove it, or use a synchronous schedule such as 1f1b."
        )
    each = steps_between_drains(config)
    for key in DRAINS:
        if getattr(config, key) % each:
            raise InputError(
                f"{key}={getattr(config, key)}: must be a multiple of {each}: with parallel.replicas="
                f"{config.parallel.replicas} a stream can drain every {each} steps."
            )


def _check_spikes(config: TrainConfig, schedule: Schedule) -> None:
    """Raises InputError where options about spikes and values that are not finite do not fit the others."""
    for name, value in (("on_spike", config.on_spike), ("on_nonfinite", config.on_nonfinite)):
        _check_leaving_out(config, schedule, name, value)
    if config.on_spike == "rewind" and not config.save_steps:
        raise InputError("on_spike=rewind: goes back to a checkpoint, and save_steps=0 saves none. Raise save_steps.")
    if config.on_nonfinite == "retry" and config.graphs:
        raise InputError(
            "on_nonfinite=retry: does not work with graphs=true, which replays steps without checks. Use stop, or "
            "remove graphs."
        )


def _check_leaving_out(config: TrainConfig, schedule: Schedule, name: str, value: str) -> None:
    """Raises InputError where an update cannot be left out, because it is made before the global norm is known."""
    default = getattr(TrainConfig(), name)
    if value == default:
        return
    if schedule.microbatches_per_update is not None:
        raise InputError(
            f"{name}={value}: does not work with schedule {config.schedule!r}, whose stages update at "
            f"different times. Use {default}, or a synchronous schedule such as 1f1b."
        )
    if not config.optimizer.barrier:
        raise InputError(
            f"{name}={value}: does not work with optimizer.barrier=false, which updates before the global "
            f"norm is known. Use {default}, or remove optimizer.barrier."
        )


def steps_between_drains(config: TrainConfig) -> int:
    """The steps after which every stage has updated, of a run whose schedule is not made yet."""
    return math.lcm(config.num_microbatches, *config.replicas) // config.num_microbatches


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
                    f"memory.{name}={_word(value)}: no offload target is configured. Add --memory.offload cpu or "
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


def check_unused(config: TrainConfig) -> None:
    """Raise for options that have no effect. An option with its default value counts as not given.

    Raises:
        InputError: the first of them.
    """
    values, defaults = (dict(flat(dataclasses.asdict(each))) for each in (config, TrainConfig()))
    for key, where, fix in _unused(config):
        if values[key] != defaults[key]:
            raise InputError(f"{key}={_word(values[key])}: has no effect {where}. Remove it, or {fix}.")


def _unused(config: TrainConfig) -> Iterator[tuple[str, str, str]]:
    """Per option without effect: its name, the setting that makes it so, and the fix."""
    for name, users in _USERS.items():
        if config.optimizer.name not in users:
            yield f"optimizer.{name}", f"with optimizer.name={config.optimizer.name}", f"use {' or '.join(users)}"
    for name in ("loss_scale", "loss_scale_steps") if config.precision.dtype != "fp16" else ():
        yield f"precision.{name}", f"with precision.dtype={config.precision.dtype}", "use fp16"
    memory = config.memory
    if memory.offload is None:
        yield "memory.offload_states", "without memory.offload", "add --memory.offload cpu or disk:PATH"
    elif memory.offload_activations is None and not (memory.offload_states or memory.offload_parameters):
        fix = "add --memory.offload_activations, or offload states or parameters"
        yield "memory.offload", "where states, parameters and activations stay", fix
    if config.parallel.tensor == 1:
        for name in ("tensor_layout", "tensor_depth", "sequence"):
            yield f"parallel.{name}", "with one tensor-parallel rank", "raise --parallel.tensor"
    if config.parallel.context == 1:
        yield "parallel.context_kind", "with one context-parallel rank", "raise --parallel.context"
    if config.parallel.expert == 1:
        for name in ("expert_axes", "expert_exchange"):
            yield f"parallel.{name}", "with one expert-parallel rank", "raise --parallel.expert"
    if not config.parallel.auto:
        yield from ((name, "without --parallel auto", "add it") for name in ("processes", "replan"))
    if not config.background_saves:
        yield "save_errors", "without background_saves", "add --background_saves true"
    if config.on_spike != "rewind":
        yield "spike_rewinds", f"with on_spike={config.on_spike}", "use rewind"
    if not config.recover:
        yield from ((name, "without --recover", "add it") for name in ("max_recoveries", "spare"))
    if not (config.recover or config.elastic):
        yield "copy_steps", "without --recover and --elastic", "add one of them"
    if not config.elastic:
        yield from ((name, "without --elastic", "add it") for name in ("min_ranks", "max_ranks", "regrow_seconds"))
    if not config.save_steps:
        yield "background_saves", "without checkpoints", "raise --save_steps"
    if config.model.pretrained is None:
        fix = "add --model.pretrained"
        yield from ((key, "with a new GPT", fix) for key in ("data.packing", "model.lora"))
    if config.model.lora is None:
        for name in ("lora_alpha", "lora_targets"):
            yield f"model.{name}", "without model.lora", "add --model.lora"
    for name in unused_data_options(config):
        fix = "raise --parallel.data"
        if DataStrategy(config.parallel.data_strategy).shards_parameters and name != "order":
            fix += ", or add --memory.offload_parameters true"
        yield f"parallel.{name}", "with one data-parallel replica", fix


def _word(value: Any) -> Any:
    """A value as on a command line."""
    return str(value).lower() if isinstance(value, bool) else value
