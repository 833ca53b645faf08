"""What a run leaves in its checkpoints, and how it goes on from them on whatever processes it has then."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeloom.train import checkpoint
from pipeloom.train.config.validate import resume_path
from pipeloom.train.data.sampler import Sampler
from pipeloom.train.optimizers import apply_options, options_of
from pipeloom.train.output.notices import resume_notices

if TYPE_CHECKING:
    from pipeloom.train.config.train_config import TrainConfig
    from pipeloom.train.process_group import Group
    from pipeloom.train.trainer import Trainer


def agreed_checkpoint(config: TrainConfig, group: Group) -> Path | None:
    """The checkpoint that all processes go on from, None for a new run: the one that process 0 finds.

    Each for itself could find another one: the directory may be that of a run that goes on saving.

    Raises:
        CheckpointError: there is none, and `auto` was not asked for.
    """
    found = resume_path(config) if group.rank == 0 else None
    answer = group.all_gather(os.fsencode(found) if found else b"")[0]
    return Path(os.fsdecode(answer)) if answer else None


def save(trainer: Trainer, step: int) -> Path:
    """Write ``checkpoint-{step}``: every process what it holds, float32 masters where forwards have other formats."""
    config, pipe = trainer.config, trainer.pipe
    sizes = config.gpt(trainer.corpus.vocabulary_size)
    sampler = trainer.sampler
    state: dict[str, Any] = {
        "model": {key: getattr(sizes, key) for key in sizes.__dataclass_fields__},
        "sampler": {
            "samples_seen": trainer.samples_seen,
            "seed": sampler.seed,
            "num_windows": sampler.num_windows,
        },
        "config": config.to_mapping(),
    }
    if trainer.scaler is not None:
        state["loss_scaler"] = trainer.scaler.state()
    return checkpoint.save(
        trainer.output_dir,
        step,
        model=pipe.state.main_state(),
        optimizer=checkpoint.optimizer_state(trainer.optimizer, trainer.names),
        random=checkpoint.random_state(),
        state=state,
        layout=layout(trainer),
        ranges=pipe.state.ranges,
        ties=pipe.state.ties,
        compute_type=config.precision.dtype if config.number_format.has_masters else None,
        exchange=trainer.group,
        total_limit=config.save_total_limit,
    )


def load(trainer: Trainer, path: Path) -> checkpoint.Checkpoint:
    """Bring everything back that `save` wrote; its files have been compared with their hashes."""
    saved = checkpoint.load(path, verify_files=False)
    pipe = trainer.pipe
    if pipe.rank is None:  # of what several ranks of this process hold, each has a copy
        tensors = pipe.state_dict()
        saved.load_model(tensors)
        pipe.load_state_dict(tensors)
    else:
        saved.load_model(pipe.state.main_state(), pipe.state.ranges)
        pipe.state.refresh()
    options = options_of(trainer.optimizer)
    saved.load_optimizer(trainer.optimizer, trainer.names, pipe.state.ranges)
    apply_options(trainer.optimizer, options)
    if trainer.scaler is not None and "loss_scaler" in saved.state:
        trainer.scaler.load(saved.state["loss_scaler"])
    sampler = saved.state["sampler"]
    same_text = sampler["num_windows"] == trainer.sampler.num_windows
    if same_text:  # its passes go on where they were
        trainer.sampler = Sampler(trainer.sampler.num_windows, sampler["seed"])
        trainer.samples_seen = sampler["samples_seen"]
    group = trainer.group
    random = saved.random(group.rank, group.size) if _places(saved.layout) == _places(layout(trainer)) else None
    if random is not None:
        checkpoint.restore_random_state(random)
    else:
        seed_generators(trainer.config.seed, saved.step, group.rank)
    trainer.notices += resume_notices(trainer.config, saved.state["config"], path, saved.step, other_text=not same_text)
    limit = trainer.config.save_total_limit
    if limit is not None and path.absolute().parent == trainer.output_dir.absolute():
        before = saved.state["config"].get("save_total_limit", limit)
        if before is None or limit < before:
            trainer.notices.append(f"the next save deletes all checkpoints but the newest {limit}")
    return saved


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Random states that follow from seed, step and process alone: dropout differs between copies."""
    digest = blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def layout(trainer: Trainer) -> dict[str, Any]:
    """Who holds what, for those who read the checkpoint, and to tell whether random states have a place."""
    parallel = trainer.config.parallel
    copies = {"copies": trainer.group.num_copies, "order": parallel.order, "data_strategy": parallel.data_strategy}
    return {
        "ranks": trainer.pipe.schedule.num_ranks,
        "processes": trainer.group.size,
        **(copies if trainer.group.num_copies > 1 else {}),
        "schedule": trainer.schedule.name,
        "stages": [list(layers) for layers in trainer.stages.layers],
    }


def _places(layout: dict[str, Any]) -> dict[str, Any]:
    """Which process computes what; who updates it is no matter."""
    return {key: value for key, value in layout.items() if key != "data_strategy"}
