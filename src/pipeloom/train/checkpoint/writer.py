"""`save`: every rank writes its part aside, rank 0 seals the manifest, one rename puts the checkpoint in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

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
from pipeloom.train.checkpoint.state import (
    SAFETENSORS_TYPES,
    OptimizerState,
    RandomState,
)
from pipeloom.train.checkpoint.tensor_file import FileRecord, TensorSource, write_bytes, write_tensors

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
    exchange: Exchange | None = None,
    total_limit: int | None = None,
) -> Path:
    """Write `output_dir/checkpoint-{step}`; every rank of `exchange` calls it, on a file system that all of them see.

    Args:
        model: this rank's parameters and persistent buffers by their names in the uncut model. A name that several
            ranks hold is written by the lowest; two names of one tensor are written once.
        optimizer, random: `optimizer_state(...)` and `random_state()` of this rank.
        state, layout: JSON, rank 0's is kept: what the trainer must remember; how the model was cut.
        total_limit: after a successful save, delete the lowest steps until so many checkpoints are left.

    Raises CheckpointError on **every** rank, naming the rank and file, when any rank fails (a full disk); then what was
    there before is untouched.
    """
    exchange = exchange or LocalExchange()
    output_dir, lead = Path(output_dir), exchange.rank == 0

    with ExitStack() as stack:

        def begin() -> dict[str, Any]:
            if total_limit is not None and total_limit < 1:
                raise CheckpointError(f"total_limit is {total_limit}, one checkpoint must stay: use 1 or more, or None")
            ties = _tied_names(model)
            partial = stack.enter_context(partial_directory(output_dir, step)).name if lead else None
            optimizer_names = [name for group in optimizer.groups for name in group["parameters"]] if optimizer else []
            return {"partial": partial, "model": [*model], "optimizer": optimizer_names, "ties": ties}

        plans = _agree(exchange, begin)
        partial = output_dir / plans[0]["partial"]
        all_ties = _merged_ties(plans)

        def write() -> dict[str, Any]:
            if not partial.is_dir():
                raise CheckpointError(f"{partial} is not there: output_dir must be on a file system all ranks share")
            suffix = f"-{exchange.rank + 1:05d}-of-{exchange.size:05d}.safetensors"
            mine = {kind: _owned(plans, kind, exchange.rank, all_ties) for kind in ("model", "optimizer")}
            return _write_part(partial, suffix, model, optimizer, random, mine)

        written = _agree(exchange, write)

        def finish() -> str:
            if lead:
                _write_manifest(partial, step, written, dict(state or {}), dict(layout or {}), all_ties)
                target = put_in_place(partial, output_dir, step)
                if total_limit is not None:
                    keep_at_most(output_dir, total_limit, newest=target)
            return ""

        _agree(exchange, finish)
    return output_dir / f"checkpoint-{step}"


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


def _owned(plans: list[dict[str, Any]], kind: str, rank: int, ties: Mapping[str, str]) -> dict[str, str]:
    """What `rank` is the lowest to hold: its own name -> the name to store it under."""
    taken = {root_name(name, ties) for plan in plans[:rank] for name in plan[kind]}
    owned: dict[str, str] = {}
    for name in plans[rank][kind]:
        root = root_name(name, ties)
        if root not in taken:
            taken.add(root)
            owned[name] = root
    return owned


def _source(name: str, tensor: Tensor) -> TensorSource:
    dtype = SAFETENSORS_TYPES.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided:
        raise CheckpointError(f"{name} is {tensor.dtype}, {tensor.layout}, which safetensors cannot hold: convert it")

    def read() -> memoryview:
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return memoryview(flat.view(torch.uint8).numpy().data)

    return TensorSource(dtype, tuple(tensor.shape), read)


def _write_part(
    partial: Path,
    suffix: str,
    model: Mapping[str, Tensor],
    optimizer: OptimizerState | None,
    random: RandomState | None,
    mine: dict[str, dict[str, str]],
) -> dict[str, Any]:
    """Write this rank's files; answers {"part": Part, "files": records, "weights": names, "bytes": tensor bytes}."""
    files: dict[str, FileRecord] = {}

    def write(kind: str, tensors: dict[str, TensorSource]) -> str:
        files[kind + suffix] = write_tensors(partial / (kind + suffix), tensors)
        return kind + suffix

    weights = {stored: _source(name, model[name]) for name, stored in mine["model"].items()}
    content: dict[str, Any] = {"model": write("model", weights)}
    if optimizer is not None:
        owned = mine["optimizer"]
        tensors = {owned[name]: state for name, state in optimizer.tensors.items() if name in owned}
        flat = {f"{name}/{key}": tensor for name, state in tensors.items() for key, tensor in state.items()}
        content |= {
            "optimizer": write("optimizer", {name: _source(name, tensor) for name, tensor in flat.items()}),
            "optimizer_class": optimizer.optimizer_class,
            "optimizer_tensors": {name: list(state) for name, state in tensors.items()},
            "optimizer_values": {owned[name]: state for name, state in optimizer.values.items() if name in owned},
            "param_groups": [
                {**group, "parameters": [owned[name] for name in group["parameters"] if name in owned]}
                for group in optimizer.groups
            ],
        }
    if random is not None:
        content["random"] = write("random", {name: _source(name, tensor) for name, tensor in random.tensors.items()})
        content["random_values"] = random.values
    return {
        "part": asdict(Part(**content)),
        "files": {name: asdict(record) for name, record in files.items()},
        "weights": list(weights),
        "bytes": sum(source.size_bytes for source in weights.values()),
    }


def _write_manifest(
    partial: Path,
    step: int,
    written: list[dict[str, Any]],
    state: dict[str, Any],
    layout: dict[str, Any],
    ties: dict[str, str],
) -> None:
    """The lead rank's files: index, manifest and, last, the manifest's hash."""
    weight_map = {name: answer["part"]["model"] for answer in written for name in answer["weights"]}
    index = {"metadata": {"total_size": sum(answer["bytes"] for answer in written)}, "weight_map": weight_map}
    files = {name: FileRecord(**record) for answer in written for name, record in answer["files"].items()}
    files[INDEX_NAME] = write_bytes(partial / INDEX_NAME, json_bytes(index))
    parts = tuple(Part(**answer["part"]) for answer in written)
    manifest = Manifest(step=step, layout=layout, state=state, files=files, ties=ties, parts=parts).to_bytes()
    write_bytes(partial / MANIFEST_NAME, manifest)
    write_bytes(partial / SEAL_NAME, seal(manifest))
