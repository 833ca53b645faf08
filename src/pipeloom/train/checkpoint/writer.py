"""`save`: every rank writes its part aside, rank 0 seals the manifest, one rename puts the checkpoint in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.directory import (
    keep_at_most,
    partial_directory,
    put_in_place,
)
from pipeloom.train.checkpoint.exchange import Exchange, LocalExchange
from pipeloom.train.checkpoint.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    SEAL_NAME,
    Manifest,
    Part,
    json_bytes,
    root_name,
    seal,
)
from pipeloom.train.checkpoint.share import Holding, Owned, Share, owned_by
from pipeloom.train.checkpoint.state import OptimizerState, RandomState
from pipeloom.train.checkpoint.tensor_file import FileRecord, write_bytes

T = TypeVar("T")


def save(
    output_dir: Path,
    step: int,
    *,
    model: Mapping[str, Tensor],
    optimizer: OptimizerState | None = None,
    random: RandomState | None = None,
    state: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    ranges: Mapping[str, Range] | None = None,
    ties: Mapping[str, str] | None = None,
    compute_type: str | None = None,
    exchange: Exchange | None = None,
    total_limit: int | None = None,
) -> Path:
    """Write `output_dir/checkpoint-{step}`; every rank of `exchange` calls it, on a file system that all of them see.

    Args:
        model: this rank's parameters and persistent buffers by their names in the uncut model. What several ranks hold
            alike is written by the lowest; two names of one tensor are written once.
        optimizer, random: `optimizer_state(...)` and `random_state()` of this rank.
        state, layout: JSON, rank 0's is kept: what the trainer must remember; how the model was cut.
        ranges: which elements this rank has of each parameter that is not whole here. State of the optimizer with as
            many elements is of the same ones. Over all ranks each element must be there; an empty range has no state.
        ties: further names of tied parameters, and the name each is given under; those seen in `model` are found.
        compute_type: the type in which the model computes, where `model` are masters in another.
        total_limit: after a successful save, delete the lowest steps until so many checkpoints are left.

    Raises CheckpointError on **every** rank, naming the rank and file, when any rank fails (a full disk), or elements
    are missing or held in parts that overlap; then what was there before is untouched.
    """
    exchange = exchange or LocalExchange()
    output_dir, lead = Path(output_dir), exchange.rank == 0
    with ExitStack() as stack:

        def begin() -> dict[str, Any]:
            if total_limit is not None and total_limit < 1:
                raise CheckpointError(f"total_limit is {total_limit}, one checkpoint must stay: use 1 or more, or None")
            plan = {**Share(model, optimizer, ranges or {}).plan(), "ties": {**(ties or {}), **_tied_names(model)}}
            return {**plan, "partial": stack.enter_context(partial_directory(output_dir, step)).name if lead else None}

        plans = _agree(exchange, begin)
        partial, all_ties = output_dir / plans[0]["partial"], _merged_ties(plans)
        mine = _owned(exchange.rank, plans, all_ties)

        def write() -> dict[str, Any]:
            if not partial.is_dir():
                raise CheckpointError(f"{partial} is not there: output_dir must be on a file system all ranks share")
            suffix = f"-{exchange.rank + 1:05d}-of-{exchange.size:05d}.safetensors"
            return Share(model, optimizer, ranges or {}).write(partial, suffix, random, *mine)

        written = _agree(exchange, write)

        def finish() -> None:
            if not lead:
                return
            known = {"layout": dict(layout or {}), "state": dict(state or {}), "compute_type": compute_type}
            _write_manifest(partial, _manifest(written, step=step, ties=all_ties, **known), written)
            target = put_in_place(partial, output_dir, step)
            if total_limit is not None:
                keep_at_most(output_dir, total_limit, newest=target)

        _agree(exchange, finish)
    return output_dir / f"checkpoint-{step}"


def _owned(rank: int, plans: list[dict[str, Any]], ties: dict[str, str]) -> list[dict[str, Owned]]:
    """What this rank writes of the model and of the optimizer; all ranks know the same, so all come to the same end."""
    try:
        return [owned_by(rank, _told(plans, kind), ties) for kind in ("model", "optimizer")]
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint was not saved: {error}") from None


def _manifest(written: list[dict[str, Any]], **known: Any) -> Manifest:
    """What all ranks have written, and what is known beside."""
    return Manifest(
        files={name: FileRecord(**record) for answer in written for name, record in answer["files"].items()},
        parts=tuple(Part.from_dict(answer["part"]) for answer in written),
        **known,
    )


def _agree(exchange: Exchange, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank, give every rank all answers (JSON). If any rank failed, every rank raises that error."""
    failure: Exception | None = None
    try:
        payload = json.dumps({"answer": work()})
    except Exception as error:  # whatever it is: the other ranks must hear of it rather than wait
        failure = error
        text = str(error) if isinstance(error, CheckpointError) else _described(error)
        payload = json.dumps({"error": " ".join(text.split())})
    answers = [json.loads(text) for text in exchange.all_gather(payload.encode())]
    errors = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
    if errors:
        rank, first = errors[0]
        more = f" (and {len(errors) - 1} more ranks)" if len(errors) > 1 else ""
        raise CheckpointError(f"the checkpoint was not saved, rank {rank}: {first}{more}") from failure
    return [answer["answer"] for answer in answers]


def _described(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'writing'}: {error.strerror}; free some space or choose another output_dir"
    return f"{type(error).__name__}: {error}"


def _tied_names(model: Mapping[str, Tensor]) -> dict[str, str]:
    """The further names of tensors that have several: {further: first}."""
    ties: dict[str, str] = {}
    first_name: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.items():
        if tensor.layout == torch.strided and tensor.numel() and tensor.data_ptr():
            key = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
            first = first_name.setdefault(key, name)
            if first != name:
                ties[name] = first
    return ties


def _merged_ties(plans: list[dict[str, Any]]) -> dict[str, str]:
    """The ties that any rank saw. An edge always leads to a root other than its start, so there is no cycle."""
    merged: dict[str, str] = {}
    for plan in plans:
        for further, first in plan["ties"].items():
            root = root_name(first, merged)
            if further not in merged and further != root:
                merged[further] = root
    return merged


def _told(plans: list[dict[str, Any]], kind: str) -> list[dict[str, Holding]]:
    return [{name: Holding.from_json(row) for name, row in plan[kind].items()} for plan in plans]


def _write_manifest(partial: Path, manifest: Manifest, written: list[dict[str, Any]]) -> None:
    """The lead rank's files: index, manifest and, last, the manifest's hash."""
    weight_map = {name: answer["part"]["model"] for answer in written for name in answer["weights"]}
    index = {"metadata": {"total_size": sum(answer["bytes"] for answer in written)}, "weight_map": weight_map}
    manifest.files[INDEX_NAME] = write_bytes(partial / INDEX_NAME, json_bytes(index))
    text = manifest.to_bytes()
    write_bytes(partial / MANIFEST_NAME, text)
    write_bytes(partial / SEAL_NAME, seal(text))
