"""`save`: writes a Hugging Face directory, each process the tensors that it holds, one after another.

    every process   names and shapes of its tensors -> the files of all        gather, write one tensor, drop it
    first process   a hidden directory                                         config.json, index, rename

The directory has its name once it is complete, see `pipeloom.common.atomic_directory`.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.common.atomic_directory import partial_directory, put_in_place
from pipeloom.common.atomic_file import write_whole
from pipeloom.common.tensor_file import TensorWriter
from pipeloom.engine.model_state import ModelState
from pipeloom.errors import CheckpointError, InputError, folded, listed
from pipeloom.pretrained.files import CONFIG_NAME, INDEX_NAME, SAFETENSORS_TYPES, SINGLE_NAME, tensor_source
from pipeloom.pretrained.layout import File, in_files, index_text
from pipeloom.pretrained.reversal import Form, Saved, reversed_conversions, unchanged
from pipeloom.processes.agreement import first_difference, together
from pipeloom.processes.members import Members

SHARD_BYTES = 5_000_000_000


def save(
    state: ModelState,
    members: Members | None,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    max_shard_bytes: int = SHARD_BYTES,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the model of a pipeline; see `Pipeline.save_pretrained`. Every process calls it.

    Args:
        state: of this process.
        members: all processes; None: this one has all ranks.
        directory, tokenizer, max_shard_bytes, dtype, overwrite: see `Pipeline.save_pretrained`.
    """
    gather = (lambda payload: [payload]) if members is None else members.gather
    leads = members is None or members.rank == 0

    def agree(work: Callable[[], Any]) -> list[Any]:
        return together(work, gather, failed=f"{directory} was not saved")

    _compare(agree(lambda: _checked(state.whole, directory, tokenizer, max_shard_bytes, dtype)))
    home, whole = Path(directory), state.whole
    with ExitStack() as stack:

        def begin() -> dict[str, Any]:
            own: dict[str, Any] = {"forms": _forms(state, dtype)}
            if leads:
                own["partial"] = stack.enter_context(partial_directory(home)).name
                _check_free(home, overwrite=overwrite)
            return own

        held = agree(begin)
        partial = home.with_name(held[0]["partial"])
        groups = saved_by(whole, state.ties, [each["forms"] for each in held])
        files = in_files(groups, max_shard_bytes)
        rank = 0 if members is None else members.rank
        failure = _write_tensors(state, partial, groups[rank], files[rank], dtype)
        agree(lambda: _raise(failure))
        agree(lambda: _finish(partial, home, whole, tokenizer, files, overwrite=overwrite) if leads else None)
    return home


# Before anything is written


def _checked(whole: Any, directory: Any, tokenizer: Any, max_shard_bytes: Any, dtype: Any) -> dict[str, Any]:
    """The arguments that must be equal on all ranks. Raises InputError for those that cannot be."""
    if whole is None:
        raise InputError(
            "save_pretrained writes models of transformers, and this pipeline has another one. Save its state_dict()."
        )
    if hasattr(whole, "peft_config"):
        raise InputError(
            f"save_pretrained writes models of transformers, and {type(whole).__name__} has adapters. Save the "
            "adapters' part of state_dict(), or merge them first."
        )
    if not isinstance(max_shard_bytes, int) or isinstance(max_shard_bytes, bool) or max_shard_bytes < 1:
        raise InputError(f"max_shard_bytes={folded(max_shard_bytes)}: must be an integer >= 1. Use {SHARD_BYTES}.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"dtype={folded(dtype)}: must be a floating-point type, such as torch.bfloat16.")
    if not isinstance(directory, str | os.PathLike) or Path(directory).name in ("", "..", "."):
        raise InputError(f"directory={folded(directory)}: must be a path with a name of its own. Use another path.")
    for each in _tokenizers(tokenizer):
        if isinstance(each, type) or not callable(getattr(each, "save_pretrained", None)):
            raise InputError(
                f"tokenizer={folded(each)}: must be a tokenizer or a processor, which writes its own files. Pass "
                "AutoTokenizer.from_pretrained(NAME)."
            )
    return {"directory": os.path.abspath(directory), "max_shard_bytes": max_shard_bytes, "dtype": str(dtype)}


def _tokenizers(tokenizer: Any) -> list[Any]:
    return [each for each in (tokenizer if isinstance(tokenizer, list | tuple) else [tokenizer]) if each is not None]


def _compare(terms: Sequence[Mapping[str, Any]]) -> None:
    """Raises InputError where two ranks pass different arguments."""
    found = first_difference(enumerate(terms))
    if found is not None:
        raise InputError(
            f"save_pretrained got {found.name}={found.one} on rank {found.first} and {found.other} on rank "
            f"{found.rank}: all ranks write one model together. Pass the same on each."
        )


def _check_free(home: Path, *, overwrite: bool) -> None:
    if not home.exists():
        return
    if not home.is_dir():
        raise CheckpointError(f"{home} is a file: a model is saved as a directory. Choose another name.")
    names = sorted(path.name for path in home.iterdir())
    if names and CONFIG_NAME not in names:
        raise CheckpointError(
            f"{home} has {listed(names, 3)} and no {CONFIG_NAME}: only the directory of a model is replaced, as a "
            "whole. Choose another name."
        )
    if names and not overwrite:
        raise CheckpointError(f"{home} exists and is not empty. Choose another name, or pass overwrite=True.")


def _forms(state: ModelState, dtype: torch.dtype | None) -> dict[str, Any]:
    """Shape and safetensors type of each tensor that this process could write."""
    forms: dict[str, Any] = {}
    if state.sharing.replica == 0 and state.sharing.blocks.leads:
        for name, (shape, kind) in state.full_forms().items():
            kind = dtype if dtype is not None and kind.is_floating_point else kind
            if kind not in SAFETENSORS_TYPES:
                raise CheckpointError(f"{name} is {kind}, which safetensors does not support. Convert it.")
            forms[name] = [list(shape), SAFETENSORS_TYPES[kind]]
    return forms


def saved_by(whole: Any, ties: Mapping[str, str], held: Sequence[Mapping[str, Any]]) -> list[list[Saved]]:
    """What each process writes: each tensor once, by the first process that has it.

    Args:
        whole: the model, with or without values.
        ties: alias of a tied tensor -> its canonical name.
        held: by process, shape and safetensors type of each of its tensors by canonical name.

    Tensors that transformers saves as one are of one process. Where they are not, the model is saved with its own
    names, which transformers reads as well.
    """
    kinds = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}
    names: dict[str, list[str]] = {}
    for alias, name in ties.items():
        names.setdefault(name, [name]).append(alias)
    left_out = set(getattr(whole, "_keys_to_ignore_on_save", None) or ())
    targets = set(getattr(whole, "all_tied_weights_keys", None) or ())
    owner: dict[str, int] = {}
    forms: dict[str, Form] = {}
    called: dict[str, str] = {}  # name in transformers' files -> canonical name
    for rank, tensors in enumerate(held):
        for name, (shape, kind) in tensors.items():
            shown = next((each for each in names.get(name, [name]) if each not in targets), name)
            if shown not in owner and shown not in left_out:
                owner[shown], called[shown] = rank, name
                forms[shown] = tuple(shape), kinds[kind]
    saved = reversed_conversions(whole, forms)
    if any(len({owner[name] for name in each.names}) > 1 for each in saved):
        saved = unchanged(forms)
    groups: list[list[Saved]] = [[] for _ in held]
    for each in saved:
        canonical = tuple(called[name] for name in each.names)
        groups[owner[each.names[0]]].append(_renamed(each, canonical))
    return groups


def _renamed(saved: Saved, names: tuple[str, ...]) -> Saved:
    """The same for tensors that have other names here."""

    def make(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return saved.make({name: values[other] for name, other in zip(saved.names, names, strict=True)})

    return Saved(names, saved.forms, make)


def _write_tensors(
    state: ModelState, partial: Path, groups: Iterable[Saved], files: Iterable[File], dtype: torch.dtype | None
) -> Exception | None:
    """Write this process's tensors as their values are gathered. After an error, gathers go on for the others."""
    of = {name: group for group in groups for name in group.names}
    waiting: dict[str, Tensor] = {}
    writers: dict[str, TensorWriter] = {}
    failure: Exception | None = None
    try:
        home_of = {name: file.name for file in files for name in file.tensors}
        if of and not partial.is_dir():
            raise CheckpointError(f"{partial.parent} is not on a file system that all processes share. Use another.")
        writers = {file.name: TensorWriter(partial / file.name, file.tensors) for file in files}
    except Exception as error:  # of any type: the others wait in the gathers below
        failure = error
    for name, value in state.full_tensors():
        if failure is not None or name not in of:
            continue
        try:
            group = of[name]
            waiting[name] = value.detach().to("cpu", dtype if value.is_floating_point() else None)
            if waiting.keys() >= set(group.names):
                for key, made in group.make({each: waiting.pop(each) for each in group.names}).items():
                    writers[home_of[key]].write(key, tensor_source(key, made).read())
        except Exception as error:
            failure = error
    for writer in writers.values():
        try:
            writer.close()
        except OSError as error:
            failure = failure or error
    return failure


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _finish(
    partial: Path, home: Path, whole: Any, tokenizer: Any, files: Sequence[Sequence[File]], *, overwrite: bool
) -> None:
    """Write what is not in tensors, and give the directory its name."""
    every = [file for own in files for file in own]
    if len(every) != 1 or every[0].name != SINGLE_NAME:
        write_whole(partial / INDEX_NAME, index_text(every))
    write_configuration(whole, partial, {kind for file in every for kind, _ in file.tensors.values()})
    for each in _tokenizers(tokenizer):
        each.save_pretrained(str(partial))
    put_in_place(partial, home, replaces=overwrite)


def write_configuration(whole: Any, directory: Path, kinds: set[str]) -> None:
    """Write config.json and generation_config.json of a model whose tensors have some safetensors types."""
    dtypes = {dtype for dtype, name in SAFETENSORS_TYPES.items() if name in kinds and dtype.is_floating_point}
    config = type(whole.config).from_dict(whole.config.to_dict())
    config.architectures = [type(whole).__name__]
    if len(dtypes) == 1:
        config.dtype = dtypes.pop()
    config.save_pretrained(str(directory))
    if whole.can_generate():
        whole.generation_config.save_pretrained(str(directory))
