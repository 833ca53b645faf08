"""Refuse a run that cannot work: one function, called by every process before it meets any other."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from pipeloom.errors import CheckpointError, InputError
from pipeloom.train.checkpoint import directory as checkpoint_directory
from pipeloom.train.checkpoint.manifest import Manifest, verify
from pipeloom.train.config.data_parallel import check_batch, check_copies, check_processes, check_validation
from pipeloom.train.config.memory_cap import check_cap
from pipeloom.train.config.memory_check import check_memory
from pipeloom.train.config.memory_options import check_less_memory
from pipeloom.train.config.schedule_choice import make_schedule, parse_cut
from pipeloom.train.config.stream_rules import check_resumed_stream, check_stream
from pipeloom.train.config.train_config import OWN_CHECKPOINT, TrainConfig
from pipeloom.train.config.unused_options import check_unused
from pipeloom.train.data.sampler import Corpus, prepare_corpus
from pipeloom.train.data.tokenizers import load_tokenizer
from pipeloom.train.output.directory import in_use


def validate_settings(config: TrainConfig) -> None:
    """Refuse options that contradict each other or mean nothing, on whatever machine, with whatever data.

    Raises:
        InputError: what was seen, the rule, the fix; in one line.
    """
    _check_numbers(config)
    _check_model(config)
    if config.output_dir == "null":
        raise InputError("output_dir is null: results need a directory; name one (./null for one of that name)")
    if config.local and config.parallel.transport != "auto":
        raise InputError(
            f"--local with parallel.transport {config.parallel.transport}: one process sends no messages; drop one"
        )
    schedule = make_schedule(config)
    parse_cut(config, schedule.num_stages)
    check_stream(config, schedule)
    check_copies(config, schedule)
    check_less_memory(config, schedule)
    check_unused(config)


def validate(config: TrainConfig, *, world_size: int | None) -> None:
    """Refuse `config` where it cannot be trained as it stands.

    Args:
        config: what was asked for.
        world_size: processes that the environment says there are; None where this process is alone (the launcher,
            or a run with `local`).

    Raises:
        InputError: what was seen, the rule, the fix; in one line.
    """
    _check_numbers(config)
    _check_model(config)
    check_memory(config, os.environ)  # first, for a schedule of absurd sizes takes as absurdly long
    validate_settings(config)
    check_cap(config)
    check_processes(config, world_size)
    checkpoint = resume_path(config)
    if checkpoint is not None:
        saved = verify(checkpoint)
        _check_checkpoint(config, checkpoint, saved, load_tokenizer(config.data.tokenizer).vocabulary_size)
        check_resumed_stream(config, make_schedule(config), checkpoint)
    output_dir = Path(config.output_dir)
    made = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    try:
        _check_writable(output_dir)
        _check_windows(config, open_corpus(config))
    except InputError:
        if made and world_size is None:  # nobody else is at work in it
            shutil.rmtree(output_dir / "data", ignore_errors=True)
            with suppress(OSError):
                for path in made:
                    path.rmdir()
        raise


def open_corpus(config: TrainConfig) -> Corpus:
    """The tokens of the run; made at the first call, mapped from the output directory afterwards."""
    data, output_dir = config.data, Path(config.output_dir)
    tokens_dir = output_dir / "data"
    return prepare_corpus(data.path, data.tokenizer, tokens_dir, data.validation_fraction, output_dir=output_dir)


def resume_path(config: TrainConfig) -> Path | None:
    """The checkpoint to go on from, or None.

    Raises:
        CheckpointError: there is none, and `auto` was not asked for.
    """
    wanted = config.resume_from_checkpoint
    if wanted is None:
        return None
    if wanted not in OWN_CHECKPOINT:
        return checkpoint_directory.resolve(Path(wanted))
    found = checkpoint_directory.latest(Path(config.output_dir))
    if found is None and wanted == "latest":
        raise CheckpointError(
            f"resume_from_checkpoint is latest, but {config.output_dir} holds no finished checkpoint: leave it out or "
            "take auto to begin a run, or name another output_dir"
        )
    return found


def _check_numbers(config: TrainConfig) -> None:
    """Counts are counts, rates are rates."""
    optimizer = config.optimizer
    least = {
        "batch.microbatches": (config.num_microbatches, 1),
        "batch.size": (config.batch.size, 1),
        "parallel.pipeline": (config.parallel.pipeline, 1),
        "parallel.data": (config.num_copies if config.parallel.data == -1 else config.parallel.data, 1),
        "model.layers": (config.model.layers, 1),
        "model.width": (config.model.width, 1),
        "model.heads": (config.model.heads, 1),
        "model.sequence_length": (config.model.sequence_length, 1),
        "eval_batches": (config.eval_batches, 1),
        "log_steps": (config.log_steps, 1),
        "save_total_limit": (1 if config.save_total_limit is None else config.save_total_limit, 1),
        "steps": (config.steps, 0),
        "seed": (config.seed, 0),
        "save_steps": (config.save_steps, 0),
        "eval_steps": (config.eval_steps, 0),
        "sample_tokens": (config.sample_tokens, 0),
        "optimizer.warmup_steps": (optimizer.warmup_steps, 0),
        "precision.loss_scale_steps": (config.precision.loss_scale_steps, 1),
    }
    for key, (value, smallest) in least.items():
        if value < smallest:
            raise InputError(f"{key} is {value}: it must be at least {smallest}; raise it")
    if config.seed >= 2**64:
        raise InputError(f"seed is {config.seed}: generators take less than 2**64; lower it")
    rates = {
        "optimizer.learning_rate": (optimizer.learning_rate, math.inf),
        "optimizer.weight_decay": (optimizer.weight_decay, math.inf),
        "optimizer.clip_norm": (optimizer.clip_norm, math.inf),
        "optimizer.min_learning_rate_fraction": (optimizer.min_learning_rate_fraction, 1.0),
        "optimizer.beta1": (optimizer.beta1, 1.0),
        "optimizer.beta2": (optimizer.beta2, 1.0),
        "optimizer.momentum": (optimizer.momentum, 1.0),
        "optimizer.muon_learning_rate": (optimizer.muon_learning_rate, math.inf),
        "model.dropout": (config.model.dropout, 1.0),
        "data.validation_fraction": (config.data.validation_fraction, 1.0),
        "sample_temperature": (config.sample_temperature, math.inf),
    }
    below = ("optimizer.beta1", "optimizer.beta2", "optimizer.momentum", "model.dropout", "data.validation_fraction")
    for key, (rate, largest) in rates.items():
        if not (math.isfinite(rate) and 0 <= rate <= largest) or (key in below and rate == largest):
            bound = "" if largest == math.inf else f" and {'below' if key in below else 'at most'} {largest:g}"
            raise InputError(f"{key} is {rate}: it must be a finite number, 0 or more{bound}; correct it")
    check_batch(config)


def _check_model(config: TrainConfig) -> None:
    model = config.model
    if config.parallel.pipeline > model.layers:
        raise InputError(
            f"parallel.pipeline is {config.parallel.pipeline} for model.layers {model.layers}: each rank needs a "
            "block; lower parallel.pipeline or raise model.layers"
        )
    config.gpt(vocabulary_size=1)  # its sizes fit each other, or it says which do not; the data is not read yet


def _check_writable(output_dir: Path) -> None:
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with in_use(output_dir), tempfile.TemporaryFile(dir=output_dir) as file:
            file.write(b"0")
    except OSError as error:
        raise InputError(
            f"output_dir {output_dir} cannot be written ({error.strerror}): results need a directory; name another"
        ) from error


def _check_windows(config: TrainConfig, corpus: Corpus) -> None:
    length = config.model.sequence_length
    corpus.num_windows(length)
    if not config.eval_steps:
        return
    check_validation(config, corpus.num_windows(length, "validation"))


def _check_checkpoint(config: TrainConfig, checkpoint: Path, manifest: Manifest, vocabulary_size: int) -> None:
    """The model is of the same sizes."""
    saved = manifest.state.get("model")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{checkpoint} was not written by `pipeloom train`: name one that was")
    asked = {**config.to_mapping()["model"], "vocabulary_size": vocabulary_size}
    for key in asked.keys() - {"dropout"}:
        if saved.get(key) != asked[key]:
            name = key if key == "vocabulary_size" else f"model.{key}"
            raise CheckpointError(
                f"{checkpoint} is of a model with {name} {saved.get(key)}, this run has {asked[key]}: they must be "
                "equal; change the option or name another checkpoint"
            )
