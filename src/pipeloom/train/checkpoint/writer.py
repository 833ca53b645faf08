"""`save`: every rank writes its files to a hidden directory, rank 0 writes the manifest and renames the directory."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pipeloom.common.checkpoint_key import SIGNATURE_NAME, CheckpointKey
from pipeloom.common.recorded_file import FileRecord
from pipeloom.common.tensor_file import write_bytes
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.parallel.placed import PlacedBlock
from pipeloom.processes.agreement import together
from pipeloom.processes.exchange import Exchange
from pipeloom.train.checkpoint.directory import check_limit, keep_at_most, partial_directory, put_in_place
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
from pipeloom.train.checkpoint.rank_files import RankFiles
from pipeloom.train.checkpoint.state import OptimizerState, RandomState
from pipeloom.train.checkpoint.written import HeldTensor, WrittenTensor, written_by_ranks

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
    blocks: Mapping[str, PlacedBlock] | None = None,
    ties: Mapping[str, str] | None = None,
    compute_type: str | None = None,
    exchange: Exchange | None = None,
    total_limit: int | None = None,
    others: Mapping[str, bytes] | None = None,
    key: CheckpointKey | None = None,
    on_tensor: Callable[[], object] = lambda: None,
) -> Path:
    """Write `output_dir/checkpoint-{step}`. A collective call of all ranks of `exchange`, on a shared file system.

    Args:
        output_dir: the output directory of the run.
        step: the training step.
        model: parameters and persistent buffers of this rank by their names in the full model. A tensor that several
            ranks hold is written by the lowest of them; a tensor with several names is written once.
        optimizer, random: `optimizer_state(...)` and `random_state()` of this rank.
        state, layout: JSON of the trainer: what it needs to resume, and how the model is split. Rank 0's is saved.
        ranges: the range of elements of each parameter that is sharded on this rank. Optimizer state with the same
            number of elements has the same range. Together, the ranks must hold all elements; an empty range has no
            state.
        blocks: the block of each parameter that the ranks of a stage share; its range is then one of the flattened
            block.
        ties: alias of a tied parameter -> its name in `model`; ties between tensors of `model` are found automatically.
        compute_type: the dtype of the model's computations, if `model` has main parameters of another dtype.
        exchange: the ranks that save together; defaults to a single process.
        others: other files by name, such as config.json of a model of transformers and those of its tokenizer. Rank 0's
            are saved; ``pipeloom checkpoint convert`` writes them to the converted model.
        key: signs the checkpoint; rank 0's is used.
        on_tensor: called before each tensor that this rank writes.
        total_limit: after the save, delete the checkpoints of the lowest steps until this number is left.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: a rank failed (for example, its disk is full), or elements are missing, or ranges overlap
            partially. Raised on **every** rank, with the failed rank and file; earlier checkpoints are not changed.
    """
    group, files, output_dir = (
        exchange or Exchange(),
        RankFiles(model, optimizer, ranges or {}, blocks or {}),
        Path(output_dir),
    )
    leads, known = group.rank == 0, {"layout": dict(layout or {}), "state": dict(state or {})}
    with ExitStack() as stack:

        def begin() -> dict[str, Any]:
            check_limit(total_limit)
            held = {**files.held(), "ties": {**(ties or {}), **tied_names(model)}}
            return {**held, "partial": stack.enter_context(partial_directory(output_dir, step)).name if leads else None}

        held = _agree(group, begin)
        partial, all_ties = output_dir / held[0]["partial"], merged_ties(held)
        weights, states = (each[group.rank] for each in to_write(held, all_ties))
        written = _agree(
            group, lambda: files.write(partial, (group.rank, group.size), random, weights, states, on_tensor)
        )

        def finish() -> None:
            if leads:
                more = {name: write_bytes(partial / name, data) for name, data in (others or {}).items()}
                _write_manifest(
                    partial, written, more, key, step=step, ties=all_ties, compute_type=compute_type, **known
                )
                keep_at_most(output_dir, total_limit, newest=put_in_place(partial, output_dir, step))

        _agree(group, finish)
    return output_dir / f"checkpoint-{step}"


class RankContent(NamedTuple):
    """One rank of `save_in_turn`; tensors are on the meta device. The fields are arguments of `save`."""

    model: Mapping[str, Tensor]
    optimizer: OptimizerState | None
    ranges: Mapping[str, Range]
    blocks: Mapping[str, PlacedBlock]
    ties: Mapping[str, str]


def save_in_turn(
    output_dir: Path,
    step: int,
    ranks: Sequence[RankContent],
    read: Callable[[int], tuple[Mapping[str, Tensor], OptimizerState | None, RandomState | None]],
    *,
    state: Mapping[str, Any],
    layout: Mapping[str, Any],
    compute_type: str | None,
    others: Mapping[str, bytes],
    key: CheckpointKey | None = None,
) -> Path:
    """Write what all `ranks` write in `save`, from one process that has the tensors of one rank at a time.

    Args:
        output_dir, step, state, layout, compute_type, others, key: see `save`.
        ranks: what each rank holds.
        read: the values of a rank's model and optimizer, and its generators.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: see `save`.
    """

    def work() -> None:
        contents = [RankFiles(rank.model, rank.optimizer, rank.ranges, rank.blocks) for rank in ranks]
        held = [{**files.held(), "ties": rank.ties} for files, rank in zip(contents, ranks, strict=True)]
        all_ties = merged_ties(held)
        models, optimizers = to_write(held, all_ties)
        with partial_directory(output_dir, step) as partial:
            written = []
            for number, rank in enumerate(ranks):
                model, optimizer, random = read(number)
                files = RankFiles(model, optimizer, rank.ranges, rank.blocks)
                place = (number, len(ranks))
                written.append(files.write(partial, place, random, models[number], optimizers[number]))
            known = {"layout": dict(layout), "state": dict(state), "compute_type": compute_type}
            more = {name: write_bytes(partial / name, data) for name, data in others.items()}
            _write_manifest(partial, written, more, key, step=step, ties=all_ties, **known)
            put_in_place(partial, output_dir, step)

    try:
        work()
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or output_dir} cannot be written ({error.strerror}). Free disk space, or choose another "
            "directory."
        ) from error
    return output_dir / f"checkpoint-{step}"


def to_write(held: list[dict[str, Any]], ties: dict[str, str]) -> list[list[dict[str, WrittenTensor]]]:
    """What each rank writes of the model, and of the optimizer. All ranks have the same input: all raise or none."""
    try:
        return [
            written_by_ranks(
                [{name: HeldTensor.from_json(row) for name, row in each[kind].items()} for each in held], ties
            )
            for kind in ("model", "optimizer")
        ]
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint was not saved: {error}") from None


def _agree(exchange: Exchange, work: Callable[[], T]) -> list[T]:
    return together(work, exchange.all_gather, failed="the checkpoint was not saved")


def tied_names(model: Mapping[str, Tensor]) -> dict[str, str]:
    """The aliases of tensors with several names: {alias: first name}."""
    ties: dict[str, str] = {}
    first_name: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.items():
        if tensor.layout == torch.strided and tensor.numel() and tensor.data_ptr():
            key = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
            first = first_name.setdefault(key, name)
            if first != name:
                ties[name] = first
    return ties


def merged_ties(held: list[dict[str, Any]]) -> dict[str, str]:
    """The ties of all ranks. Each entry leads to a root other than its key, so there is no cycle."""
    merged: dict[str, str] = {}
    for each in held:
        for alias, first in each["ties"].items():
            root = root_name(first, merged)
            if alias not in merged and alias != root:
                merged[alias] = root
    return merged


def _write_manifest(
    partial: Path,
    written: list[dict[str, Any]],
    others: dict[str, FileRecord],
    key: CheckpointKey | None,
    **known: Any,
) -> None:
    """Write the files of rank 0: index, manifest, its signature and, last, its hash; `known` are its other fields."""
    files = {
        name: FileRecord.from_dict(record) for answer in written for name, record in answer["files"].items()
    } | others
    weight_map = {name: answer["part"]["model"] for answer in written for name in answer["weights"]}
    index = {"metadata": {"total_size": sum(answer["bytes"] for answer in written)}, "weight_map": weight_map}
    files[INDEX_NAME] = write_bytes(partial / INDEX_NAME, json_bytes(index))
    parts = tuple(Part.from_dict(answer["part"]) for answer in written)
    text = Manifest(files=files, parts=parts, **known).to_bytes()
    write_bytes(partial / MANIFEST_NAME, text)
    if key is not None:
        write_bytes(partial / SIGNATURE_NAME, key.sign(text))
    write_bytes(partial / SEAL_NAME, seal(text))
