"""Validates a run against this machine and its files, before any process starts. No torch."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.common.quantities import bytes_text
from pipeloom.errors import CheckpointError, DataError, InputError, one_line
from pipeloom.ir.versions import check_drained
from pipeloom.models.experts.settings import ExpertSettings
from pipeloom.parallel.options import CPU
from pipeloom.plan.memory.state_bytes import OPTIMIZERS, NumberBytes
from pipeloom.processes.launching import torchrun
from pipeloom.train.checkpoint.directory import in_use
from pipeloom.train.checkpoint.manifest import Manifest
from pipeloom.train.checkpoint.resume import find_good
from pipeloom.train.config.fine_tuning import check_same_model
from pipeloom.train.config.inside_stage import samples_multiple
from pipeloom.train.config.memory import under_cap
from pipeloom.train.config.planned import of_plan
from pipeloom.train.config.rules.settings import check_sizes, needs_samples, validate_settings
from pipeloom.train.config.schedule import is_stream, make_schedule, schedule_name
from pipeloom.train.config.train_config import AUTO, TrainConfig
from pipeloom.train.data.opening import open_samples, run_tokenizer
from pipeloom.train.data.samples import Samples
from pipeloom.train.output.saved_state import check_saved_state

_GPU = Path("/dev/nvidiactl")  # with a GPU, the model lies in its memory, and torch says what is missing
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_FLOAT_BYTES = 4
_KEPT_WIDTHS = 12  # floats per token and block, in widths, that a forward keeps: norms, q, k, v, attention, MLP
_LEAST_VOCABULARY = 256


def validate(config: TrainConfig, *, world_size: int | None, leads: bool = True) -> list[str]:
    """Validate that `config` can be trained.

    Args:
        config: as given.
        world_size: processes of the process group that torchrun started; None for the launcher, or with `local`.
        leads: whether this process is the only one, or the first of torchrun.

    Returns:
        Lines to show: damaged checkpoints that were passed over.

    Raises:
        InputError: the first problem.
    """
    check_sizes(config)
    _check_machine(config)  # before a schedule of absurd sizes is made
    try:
        validate_settings(config)
    except InputError as error:
        raise of_plan(config.plan, error) from None
    if config.parallel.slices != AUTO:  # with slices that are not measured yet, less memory may do
        device = "cuda" if _has_gpu() else "cpu"
        if config.memory.cap is not None:
            under_cap(config, run_tokenizer(config).vocabulary_size, device=device)
    check_processes(config, world_size)
    output_dir = Path(config.output_dir)
    key = CheckpointKey.read(config.checkpoint_key_file)
    resumed = find_good(config.resume_from_checkpoint, output_dir, leads=leads, key=key)
    if resumed is not None:
        _check_checkpoint(config, resumed.path, resumed.manifest)
    made = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    try:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            with in_use(output_dir), tempfile.TemporaryFile(dir=output_dir) as file:
                file.write(b"0")
        except OSError as error:
            raise InputError(
                f"output_dir={output_dir}: cannot be written ({error.strerror}). Use another directory."
            ) from error
        _check_data(config, open_samples(config))
    except InputError:
        if made and world_size is None:  # no other process uses it
            shutil.rmtree(output_dir / "data", ignore_errors=True)
            with suppress(OSError):
                for path in made:
                    path.rmdir()
        raise
    return [] if resumed is None else resumed.notices


def check_processes(config: TrainConfig, world_size: int | None) -> None:
    """Raise InputError unless `config` takes `world_size` processes; None: a launcher starts as many as it takes."""
    ranks, degree, inside = config.num_ranks, config.data_degree, config.stage_processes
    if config.local and world_size not in (None, 1):
        raise InputError(
            f"--local runs all ranks in one process, but torchrun started {world_size}. Run `pipeloom train --local` "
            "without torchrun, or remove --local."
        )
    if config.recover and world_size is not None and torchrun.RUN not in os.environ:
        raise InputError(
            "recover=true: only pipeloom's own launcher and torchrun start ranks again. Run `pipeloom train` with "
            "torchrun or without srun and mpirun, or remove --recover."
        )
    if config.reroute and world_size is not None:
        raise InputError(
            "reroute=true: only pipeloom's own launcher knows which rank was lost. Remove --reroute, or run "
            "`pipeloom train` without torchrun."
        )
    if config.local or world_size in (None, config.num_processes):
        return
    if inside > 1:
        raise InputError(
            f"{world_size} processes: parallel.pipeline={ranks} x parallel.data={degree} x parallel.tensor="
            f"{config.parallel.tensor} x parallel.context={config.parallel.context} are {config.num_processes}. Start "
            f"torchrun with {config.num_processes} processes."
        )
    if degree > 1:
        raise InputError(
            f"parallel.data={degree}: {degree} replicas of {ranks} ranks are {degree * ranks} processes, not "
            f"{world_size}. Start torchrun with {ranks * degree} processes{_replicas(config, world_size)}."
        )
    if config.parallel.replicas is None:
        fix = f"use --parallel.pipeline {world_size}{_replicas(config, world_size)}"
    else:
        fix = f"change --parallel.replicas so that its numbers add up to {world_size}"
    raise InputError(
        f"{world_size} processes for {ranks} pipeline ranks: each process runs one rank. Start torchrun with {ranks} "
        f"processes, or {fix}."
    )


def _replicas(config: TrainConfig, world_size: int | None) -> str:
    """The end of a fix: the data-parallel degree that uses all processes; empty if there is none."""
    degree, rest = divmod(world_size or 0, config.num_ranks)
    return "" if rest or not degree or is_stream(schedule_name(config)) else f", or use --parallel.data {degree}"


def _check_data(config: TrainConfig, samples: Samples) -> None:
    """Validate that there is text to train on, and enough for an evaluation."""
    length = config.model.sequence_length
    samples.num_samples()
    if not config.eval_steps:
        return
    found = samples.num_samples("validation")
    if found < config.batch.size and samples_multiple(config) > 1:
        raise DataError(
            f"the validation data has {found} samples of {length} tokens: parallel.tensor_layout="
            f"{config.parallel.tensor_layout} needs a whole batch of {config.batch.size}. Raise "
            "data.validation_fraction, add text, lower batch.size, or use --eval_steps 0."
        )
    if found // config.data_degree < config.num_microbatches:
        needed = config.data_degree * config.num_microbatches
        raise DataError(
            f"the validation data has {found} samples of {length} tokens: {needs_samples(config)}, {needed} in all. "
            "Raise data.validation_fraction, add text, lower batch.microbatches, or use --eval_steps 0."
        )


def _check_checkpoint(config: TrainConfig, checkpoint: Path, manifest: Manifest) -> None:
    """Validate that a checkpoint has the model's sizes, and that a stream can drain at its step."""
    check_saved_state(checkpoint, manifest.state)
    saved = manifest.state["model"]
    if config.facts is not None or saved.get("pretrained") is not None:
        check_same_model(config, checkpoint, saved)
        return
    vocabulary_size = run_tokenizer(config).vocabulary_size
    asked = {**config.gpt_sizes, "vocabulary_size": vocabulary_size}
    defaults = TrainConfig().gpt_sizes
    # Earlier versions have fewer sizes.
    meant = _with_defaults(asked)
    try:
        meant_then = _with_defaults({**defaults, **saved})
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint} has a model of other sizes ({one_line(error)}). Use another one."
        ) from error
    then = {key: saved.get(key, defaults.get(key)) for key in asked}
    other = [key for key in asked if key != "dropout" and meant_then[key] != meant[key]]
    other.sort(key=lambda key: asked[key] == then[key])  # what follows from others, such as defaults of a router, last
    if other:
        key = other[0]
        name = key if key == "vocabulary_size" else f"model.{key}"
        raise CheckpointError(
            f"{name}={asked[key]}: checkpoint {checkpoint} has {then[key]}; both must be equal. Change "
            "the option, or name another checkpoint."
        )
    schedule = make_schedule(config)
    if schedule.microbatches_per_update is not None:
        check_drained(schedule, manifest.step, f"{checkpoint} is after step {manifest.step}")


def _with_defaults(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a model with what None means filled in."""
    found = dict(sizes)
    if found["kv_heads"] is None:
        found["kv_heads"] = found["heads"]
    if found["experts"]:
        settings = {name: found[name] for name in ExpertSettings._fields}
        found |= ExpertSettings.of(**settings)._asdict()
        if found["expert_width"] is None:
            found["expert_width"] = found.get("mlp_ratio", 4) * found["width"]
    return found


# The memory of this machine


def _has_gpu() -> bool:
    return _GPU.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def _check_machine(config: TrainConfig) -> None:
    """Validate that a lower bound of the model's and the batch's memory fits this machine.

    Raises:
        InputError: the sizes, the bytes they need, and the bytes there are.
    """
    if config.graphs and not _has_gpu():
        raise InputError(
            "graphs=true: this machine has no CUDA device, and CUDA graphs are recorded on one. Remove graphs, or see "
            "`pipeloom doctor`."
        )
    if _has_gpu() or config.model.pretrained is not None:
        return
    model, batch = _least_bytes(config)
    processes = config.num_processes
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    share = min(1.0, int(local) / processes) if local.isdecimal() else 1.0
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        limit = min(limit, int(_CGROUP_LIMIT.read_text()))
    if (model + batch) * share > limit:
        experts = f"model.experts={config.model.experts}, " if config.model.experts else ""
        what, fix = (
            (f"{experts}model.layers={config.model.layers} and model.width={config.model.width}", "Lower one of them.")
            if model > batch
            else (
                f"batch.size={config.batch.size} in {config.num_microbatches} micro-batches of "
                f"model.sequence_length={config.model.sequence_length}",
                "Lower batch.size, or raise batch.microbatches.",
            )
        )
        raise InputError(
            f"{what}: training needs at least {bytes_text(model * share)} for the model and "
            f"{bytes_text(batch * share)} for a batch; this machine has {bytes_text(limit)}. {fix}"
        )


def _least_bytes(config: TrainConfig) -> tuple[int, int]:
    """Lower bounds over all processes: weights, gradients and states; a batch, and a micro-batch's activations."""
    model, batch, replicas = config.model, config.batch, config.parameter_replicas
    sizes = config.gpt(_LEAST_VOCABULARY)
    experts = _parameter_bytes(config, max(1, replicas // max(1, config.parallel.expert))) * sizes.num_expert_parameters
    others = _parameter_bytes(config, replicas) * (sizes.num_parameters - sizes.num_expert_parameters)
    tokens = batch.size // config.num_microbatches * model.sequence_length  # a micro-batch of every replica
    recomputes = config.memory.recompute != "none" or config.memory.cap is not None
    kept = model.layers * (1 if recomputes else _KEPT_WIDTHS)
    activations = 4 * tokens * (kept * model.width + _LEAST_VOCABULARY)
    return experts + others, activations + 16 * batch.size * model.sequence_length


def _parameter_bytes(config: TrainConfig, degree: int) -> int:
    """Bytes per parameter over `degree` replicas."""
    strategy, formats = config.data_parallel.kind, NumberBytes.of(config.number_format)
    to_disk = config.memory.offload not in (None, CPU)
    masters_here = not (to_disk and config.memory.offload_parameters)
    moments = 0 if to_disk and config.memory.offload_states else int(_FLOAT_BYTES * OPTIMIZERS[config.optimizer.name])
    masters = _FLOAT_BYTES if formats.has_masters and masters_here else 0
    return (
        formats.compute * (int(masters_here) if strategy.shards_parameters else degree)
        + formats.gradient * (1 if strategy.shards_gradients else degree)
        + (moments + masters) * (1 if strategy.shards_optimizer else degree)
    )
