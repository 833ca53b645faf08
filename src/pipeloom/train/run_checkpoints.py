"""The checkpoints of a run: saved by all its processes, and loaded on any number of them."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipeloom.data.sampler import Sampler
from pipeloom.parallel.placed import PlacedBlock, cut_blocks
from pipeloom.processes.agreement import together
from pipeloom.slicing.context import hashed
from pipeloom.train import checkpoint
from pipeloom.train.checkpoint.directory import resume_path
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.output.display import resume_notices
from pipeloom.train.output.rewinds import Rewind, read_rewinds, with_rewinds
from pipeloom.train.process_group import Group
from pipeloom.train.recovery.state_copies import StateCopy
from pipeloom.train.run_model import RunModel
from pipeloom.train.run_parts import RunParts

_V = TypeVar("_V")


def agreed_checkpoint(config: TrainConfig, group: Group) -> Path | None:
    """The checkpoint that all processes resume from, None for a new run: the one that process 0 finds.

    Processes that look by themselves could find different ones, because another run may save meanwhile.

    Raises:
        CheckpointError: there is none, and the option is not `auto`.
    """
    wanted, output_dir = config.resume_from_checkpoint, Path(config.output_dir)
    found = resume_path(wanted, output_dir) if group.rank == 0 else None
    answer = group.all_gather(os.fsencode(found) if found else b"")[0]
    return Path(os.fsdecode(answer)) if answer else None


def save(run: RunParts, step: int) -> Path:
    """Write ``checkpoint-{step}``; each process writes its shards. 16-bit formats: float32 main parameters."""
    run.journal.enter(f"checkpoint after step {step}")
    return checkpoint.save(
        run.output_dir, step, exchange=run.group, on_tensor=lambda: saves_tensor(run), **contents(run)
    )


def saves_tensor(run: RunParts) -> None:
    """A tensor of a checkpoint is about to be written: progress of a process that saves or waits for its save."""
    run.journal.progressed("checkpoint")


def contents(run: RunParts) -> dict[str, Any]:
    """What this process has to save, as `checkpoint.save` takes it; tensors are not copied."""
    config = run.config
    state: dict[str, Any] = {
        "model": run.model_state,
        "sampler": {
            "samples_seen": run.samples_seen,
            "seed": run.sampler.seed,
            "num_windows": run.sampler.num_windows,
            "passed_over": run.sampler.passed_over,
            "data": run.samples.identity,
        },
        "recent_steps": run.band.state(),
        "config": config.to_mapping(),
    }
    if run.scaler is not None:
        state["loss_scaler"] = run.scaler.state()
    return {
        "optimizer": checkpoint.optimizer_state(run.optimizer, _names(run)),
        "random": checkpoint.random_state(),
        "state": state,
        "total_limit": config.save_total_limit,
        "key": run.checkpoint_key,
        **held(run),
    }


def save_model(run: RunParts, directory: Path) -> Path:
    """Write a checkpoint without optimizer and sampler, which no run can resume from, into a directory."""
    return checkpoint.save(
        directory, run.config.steps, state={"model": run.model_state}, exchange=run.group, **held(run)
    )


def held(run: RunModel) -> dict[str, Any]:
    """What this process holds of the model, as `checkpoint.save` takes it."""
    config, state = run.config, run.pipeline.state
    return {
        "model": _trained(run, state.main_state()),
        "layout": _layout(run),
        "ranges": _trained(run, state.ranges),
        "blocks": _trained(run, _blocks(run)),
        "ties": state.ties,
        "compute_type": config.precision.dtype if config.number_format.has_masters else None,
    }


def load(run: RunParts, path: Path) -> checkpoint.Checkpoint:
    """Restore everything that `save` wrote."""
    saved = checkpoint.load(path, key=run.checkpoint_key)
    saved.on_tensor = lambda: run.journal.progressed("loading")
    same_text = restore(run, saved)
    if same_text and path.absolute().parent == run.output_dir.absolute():
        run.sampler = with_rewinds(run.sampler, _rewinds(run))
    run.notices += resume_notices(run.config, saved.state["config"], path, saved.step, other_text=not same_text)
    limit = run.config.save_total_limit
    if limit is not None and path.absolute().parent == run.output_dir.absolute():
        before = saved.state["config"].get("save_total_limit", limit)
        if before is None or limit < before:
            run.notices.append(f"the next save deletes all checkpoints but the newest {limit}")
    return saved


def restore(run: RunParts, saved: checkpoint.Checkpoint | StateCopy) -> bool:
    """Restore the state of a process; returns whether samples go on where they were, as they do with the same text."""
    pipe, group = run.pipeline, run.group
    if pipe.rank is None:  # this process holds all ranks: each has its own tensors of tied parameters
        tensors = pipe.state_dict()
        saved.load_model(_trained(run, tensors))
        pipe.load_state_dict(tensors)
    else:
        saved.load_model(_trained(run, pipe.state.main_state()), pipe.state.ranges, blocks=_blocks(run))
        pipe.state.refresh()
    groups = run.optimizer.param_groups
    given = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    saved.load_optimizer(run.optimizer, _names(run), pipe.state.ranges, blocks=_blocks(run))
    for param_group, options in zip(groups, given, strict=True):  # the options of this run, not the saved ones
        param_group.update(options)
    if run.scaler is not None and "loss_scaler" in saved.state:
        run.scaler.load(saved.state["loss_scaler"])
    sampler = saved.state["sampler"]
    identity = run.samples.identity
    same_text: bool = sampler["num_windows"] == run.sampler.num_windows and sampler.get("data", identity) == identity
    if same_text:  # its passes continue where they were
        passed_over = [(start, stop) for start, stop in sampler.get("passed_over", ())]
        run.sampler = Sampler(run.sampler.num_windows, sampler["seed"], passed_over, run.samples.mixture)
        run.samples_seen = sampler["samples_seen"]
        if "recent_steps" in saved.state:
            run.band.load(saved.state["recent_steps"])
    random = saved.random(group.rank, group.size) if same_places(saved.layout, _layout(run)) else None
    if random is not None:
        checkpoint.restore_random_state(random)
    else:
        seed_generators(run.config.seed, saved.step, group.seed_rank)
    return same_text


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed this process's generators from seed, step and process alone: dropout differs between replicas.

    Tensor-parallel ranks, of which each takes its part of one mask, pass the same `rank`.
    """
    torch.manual_seed(hashed(seed, step, rank))


def same_places(layout: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether each process computes the same in two layouts, so that random states can be restored."""
    any_strategy = {"data_strategy": None}  # it does not decide which process computes what
    return {**layout, **any_strategy} == {**other, **any_strategy}


def _rewinds(run: RunParts) -> list[Rewind]:
    """The rewinds of this run, as process 0 reads them; every process calls it."""
    found = together(
        lambda: [asdict(each) for each in read_rewinds(run.output_dir)] if run.group.rank == 0 else [],
        run.group.all_gather,
        failed="the checkpoint was not loaded",
    )
    return [Rewind.from_dict(row) for row in found[0]]


def _trained(run: RunModel, values: Mapping[str, _V]) -> dict[str, _V]:
    """The values of what a checkpoint has: everything, or with adapters the parameters that are trained."""
    if run.config.model.lora is None:
        return dict(values)
    names = {name for name, parameter in run.pipeline.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in values.items() if name in names}


def _names(run: RunParts) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in run.pipeline.named_parameters()}


def _blocks(run: RunModel) -> dict[str, PlacedBlock]:
    """The blocks of parameters that the processes of a stage share."""
    return cut_blocks(run.pipeline.named_parameters())


def _layout(run: RunModel) -> dict[str, Any]:
    """What each process holds, for readers, and to decide whether random states can be restored."""
    parallel, group = run.config.parallel, run.group
    replicas = {"copies": group.data_degree, "order": parallel.order, "data_strategy": parallel.data_strategy}
    inside: dict[str, Any] = {}
    if parallel.tensor > 1:
        inside |= {"tensor": parallel.tensor, "tensor_layout": parallel.tensor_layout}
    if parallel.context > 1:
        inside |= {"context": parallel.context, "context_kind": parallel.context_kind}
    if parallel.expert > 1:
        inside |= {"expert": parallel.expert, "expert_axes": parallel.expert_axes}
    return {
        "ranks": run.pipeline.schedule.num_ranks,
        "processes": group.size,
        **(replicas if group.data_degree > 1 else {}),
        **({"order": parallel.order, "data_strategy": parallel.data_strategy} | inside if inside else {}),
        "schedule": run.schedule.name,
        "stages": [list(layers) for layers in run.stages.layers],
    }
