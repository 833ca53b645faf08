"""Training state in the checkpoint directories of Trainer.

config.json, model.safetensors, ...   the model, as Trainer's users expect it
pipeline/checkpoint-N/                main parameters and optimizer states, sharded, and the scheduler; any layout
                                      loads it, see `pipeloom.train.checkpoint`
trainer_state.json, ...               as of Trainer
rng_state_R.pth                       random generators of process R, as of Trainer
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.processes import Processes
from pipeloom.parallel.placed import cut_blocks
from pipeloom.processes.exchange import DistributedExchange, Exchange
from pipeloom.train import checkpoint
from pipeloom.training import Pipeline

_FOLDER = "pipeline"


def save_model(directory: Path, pipe: Pipeline, tokenizer: Any, arguments: str, processes: Processes) -> None:
    """Write the model into a directory, which may have other files, as `from_pretrained` reads it.

    Every process calls it.

    Args:
        tokenizer: or processor, or None.
        arguments: those of Trainer, for readers; written as ``training_args.json``.
    """
    partial = directory / ".model"

    def begin() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # of a killed process

    processes.first_makes(begin)
    pipe.save_pretrained(partial, tokenizer)

    def put_in_place() -> None:
        for stale in directory.glob("model*.safetensors*"):
            stale.unlink()
        for path in partial.iterdir():
            target = directory / path.name
            if path.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            path.replace(target)
        partial.rmdir()
        (directory / "training_args.json").write_text(arguments + "\n", encoding="utf-8")

    processes.first_makes(put_in_place)


def save_state(
    directory: Path,
    step: int,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer,
    scheduler: Mapping[str, Any],
    processes: Processes,
) -> None:
    """Write the training state of all processes into a checkpoint directory. Every process calls it.

    Args:
        scheduler: the state of the learning rate scheduler, of values that JSON has.

    Raises:
        CheckpointError: a process could not write its part; raised on all.
    """
    exchange = Exchange() if processes.members is None else DistributedExchange(processes.members.group)
    checkpoint.save(
        directory / _FOLDER,
        step,
        model=pipe.state.main_state(),
        optimizer=checkpoint.optimizer_state(optimizer, _names(pipe)),
        state={"scheduler": dict(scheduler)},
        layout={"ranks": pipe.schedule.num_ranks, "processes": processes.size, "schedule": pipe.schedule.name},
        ranges=pipe.state.ranges,
        blocks=cut_blocks(pipe.named_parameters()),
        ties=pipe.state.ties,
        exchange=exchange,
    )


def load_parameters(directory: str, pipe: Pipeline) -> None:
    """Load the parameters that `save_state` wrote.

    Raises:
        InputError: the directory has no training state of a pipeline.
        CheckpointError: it is damaged, or of another model.
    """
    saved = _open(directory)
    if pipe.rank is None:  # this process holds all ranks: each has its own tensors of tied parameters
        tensors = pipe.state_dict()
        saved.load_model(tensors)
        pipe.load_state_dict(tensors)
        return
    saved.load_model(pipe.state.main_state(), pipe.state.ranges, blocks=cut_blocks(pipe.named_parameters()))
    pipe.state.refresh()


def load_optimizer(directory: str, pipe: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load the optimizer states that `save_state` wrote; returns that of the scheduler. Errors: `load_parameters`."""
    blocks, saved = cut_blocks(pipe.named_parameters()), _open(directory)
    saved.load_optimizer(optimizer, _names(pipe), pipe.state.ranges, blocks=blocks)
    scheduler: dict[str, Any] = saved.state["scheduler"]
    return scheduler


def has_state(directory: str) -> bool:
    """Whether a checkpoint directory has training state of a pipeline."""
    return checkpoint.latest(Path(directory) / _FOLDER) is not None


def _open(directory: str) -> checkpoint.Checkpoint:
    found = checkpoint.latest(Path(directory) / _FOLDER)
    if found is None:
        raise InputError(
            f"{directory} has no training state of a pipeline: it was saved by another Trainer, or with "
            "save_only_model. Start a new run from its weights with from_pretrained."
        )
    return checkpoint.load(found)


def _names(pipe: Pipeline) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in pipe.named_parameters()}
