"""Rewrites a checkpoint of `pipeloom train` as the processes of a plan would have saved it.

saved parts -> what each process of the plan holds (its pipeline on the meta device) -> parts, one process at a time

Tensors, position in the data and training step stay the same, so a run of the plan resumes with the same losses from
either checkpoint. From the new one each of its processes reads its own files alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.ir.versions import check_drained
from pipeloom.parallel import run_threads
from pipeloom.plan.plan import Plan
from pipeloom.plan.train_options import PLANNED, options_of_plan
from pipeloom.train import checkpoint
from pipeloom.train.checkpoint.convert import check_new
from pipeloom.train.checkpoint.manifest import INDEX_NAME, verify
from pipeloom.train.checkpoint.state import OptimizerState, RandomState
from pipeloom.train.checkpoint.writer import RankContent, save_in_turn
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.sections import MemoryConfig
from pipeloom.train.config.train_config import TrainConfig, flat
from pipeloom.train.output.saved_state import check_saved_state
from pipeloom.train.process_group import Group, make_mesh
from pipeloom.train.run_checkpoints import held, same_places
from pipeloom.train.run_model import RunModel

_OF_THE_RUN = ("batch.size", "precision.dtype", "precision.gradients")  # kept where a plan does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharded:
    """What `reshard` wrote.

    Attributes:
        path: the checkpoint.
        step: its training step.
        config: of the run that resumes from it.
        num_processes: of the plan.
    """

    path: Path
    step: int
    config: TrainConfig
    num_processes: int


def reshard(source: Path, plan_file: Path, out: Path, key: CheckpointKey | None = None) -> Resharded:
    """Write a checkpoint in the layout of a plan to ``out/checkpoint-N``, with the step and data position of `source`.

    The memory that this takes is that of one process of the plan: its parameters and optimizer states.

    Args:
        source: a checkpoint of `pipeloom train`, or its output directory.
        plan_file: a file of `Plan.save`.
        out: a new output directory.
        key: that the checkpoint must be signed with, and which signs the new one.

    Raises:
        InputError: `out` is not empty, or `pipeloom train` cannot run the plan with this model.
        CheckpointError: the checkpoint is damaged, was not written by `pipeloom train`, or has optimizer state that the
            plan would shard and that cannot be.
    """
    plan, saved = Plan.load(plan_file), checkpoint.load(source, key=key)
    check_saved_state(saved.path, saved.state)
    check_new(out)
    config = _planned_config(saved.state["config"], plan, plan_file, out)
    validate_settings(config)
    verify(saved.path, key)
    ranks, told = _planned_ranks(config, saved)
    same = len(ranks) == saved.num_parts and same_places(saved.layout, told["layout"])

    def read(rank: int) -> tuple[Mapping[str, Tensor], OptimizerState | None, RandomState | None]:
        content = ranks[rank]
        model = {name: torch.empty_like(tensor, device="cpu") for name, tensor in content.model.items()}
        saved.load_model(model, content.ranges, blocks=content.blocks)
        optimizer = saved.optimizer_state(content.model, content.ranges, blocks=content.blocks)
        return model, optimizer, saved.random(rank, len(ranks)) if same else None

    state = {**saved.state, "config": config.to_mapping()}
    path = save_in_turn(out, saved.step, ranks, read, state=state, others=_other_files(saved), key=key, **told)
    return Resharded(path=path, step=saved.step, config=config, num_processes=len(ranks))


def _planned_config(saved: Mapping[str, Any], plan: Plan, plan_file: Path, out: Path) -> TrainConfig:
    """The configuration of a run: the saved one with the plan's options, and defaults for what the plan leaves out."""
    kept = TrainConfig.from_mapping(saved).to_mapping()
    usual = dict(flat(TrainConfig().to_mapping()))
    values = dict(flat(kept)) | {key: usual[key] for key in PLANNED if key not in _OF_THE_RUN}
    values |= options_of_plan(plan, str(plan_file))
    values |= {"plan": None, "output_dir": str(out), "local": False, "resume_from_checkpoint": None}
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return TrainConfig.from_mapping(nested)


def _planned_ranks(config: TrainConfig, saved: checkpoint.Checkpoint) -> tuple[list[RankContent], dict[str, Any]]:
    """What each process of a run holds, and what they tell `save` of their layout."""
    config = replace(config, memory=MemoryConfig())  # offload and recomputation change no layout
    vocabulary_size, size = int(saved.state["model"].get("vocabulary_size", 0)), config.num_processes

    def of(group: Group) -> dict[str, Any]:
        run = RunModel(config, group, vocabulary_size)
        try:
            if run.schedule.microbatches_per_update is not None:
                check_drained(run.schedule, saved.step, f"{saved.path} is after step {saved.step}")
            return held(run)
        finally:
            run.pipeline.close()

    def process() -> dict[str, Any]:
        with make_mesh(config, size) as mesh:
            return of(Group(mesh.rank, size, torch.device("meta"), mesh))

    found = run_threads(size, process) if size > 1 else [of(Group(0, 1, torch.device("meta")))]
    ranks = []
    for mine in found:
        model, ranges, blocks = (mine[name] for name in ("model", "ranges", "blocks"))
        optimizer = saved.optimizer_state(model, ranges, blocks=blocks, read=False)
        ranks.append(RankContent(model, optimizer, ranges, blocks, mine["ties"]))
    return ranks, {key: found[0][key] for key in ("layout", "compute_type")}


def _other_files(saved: checkpoint.Checkpoint) -> dict[str, bytes]:
    """The files of a checkpoint that are no rank's, such as config.json of a model of transformers."""
    parts = {file for part in saved.manifest.parts for file in (part.model, part.optimizer, part.random)}
    names = [name for name in saved.manifest.files if name not in parts and name != INDEX_NAME]
    return {name: (saved.path / name).read_bytes() for name in names}
