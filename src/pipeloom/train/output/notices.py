"""Notices that a run shows before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeloom.train.config.schedule import is_stream
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.corpus import Corpus

# Options that change the losses of a resumed run, or the checkpoints it keeps.
_MATTERS = ("data", "batch", "optimizer", "precision", "seed", "model", "save_total_limit")
_MATTERS_IN_STREAMS = (  # of asynchronous schedules also: staleness of gradients, and drains
    *("schedule", "weights", "eval_steps", "save_steps"),
    *(f"parallel.{name}" for name in ("pipeline", "replicas", "cut", "in_flight")),
)
_MOST_NAMED = 3  # directories in one line
_PATHS = ("data.path", "data.tokenizer")


def found_text(corpus: Corpus) -> str:
    """``12,345 tokens of 3 files``, and the output directories of runs among them."""
    text = f"{len(corpus.train):,} tokens of {corpus.num_files} files"
    if not corpus.left_out:
        return text
    named = ", ".join(map(str, corpus.left_out[:_MOST_NAMED]))
    more = len(corpus.left_out) - _MOST_NAMED
    return f"{text} (output of runs, left out: {named}{f' and {more} more' if more > 0 else ''})"


def skipped_notice(skipped: Mapping[str, int]) -> list[str]:
    """``["3 files skipped: 2 not UTF-8 text, 1 empty"]``, or nothing."""
    number = sum(skipped.values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
    return [f"{number} file{'s' if number > 1 else ''} skipped: {reasons}"] if number else []


def resume_notices(
    config: TrainConfig, saved: Mapping[str, Any], checkpoint: Path, step: int, *, other_text: bool
) -> list[str]:
    """What differs from the run that wrote `checkpoint`, and whether no step is left to train."""
    before, now = dict(_flat(saved)), dict(_flat(config.to_mapping()))
    streams = is_stream(config.schedule) or is_stream(str(before.get("schedule")))
    changed = [
        f"{key} {_shown(key, before[key])} -> {_shown(key, value)}"
        for key, value in now.items()
        if key.split(".")[0] in _MATTERS or (streams and key in _MATTERS_IN_STREAMS)
        if key in before and _plain(key, before[key]) != _plain(key, value)
    ]
    lines = []
    if changed:
        seed = "; samples keep the order of the first seed" if config.seed != before.get("seed", config.seed) else ""
        lines.append(f"different from {checkpoint}: {', '.join(changed)}{'' if other_text else seed}")
    if other_text:
        lines.append(f"the text differs from that of {checkpoint}: the order of samples starts again")
    if config.steps <= step:
        lines.append(f"nothing to train: {checkpoint} is after step {step}, and steps={config.steps}. Raise --steps.")
    return lines


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _plain(key: str, value: Any) -> Any:
    return str(Path(value).absolute()) if key in _PATHS and value is not None else value


def _shown(key: str, value: Any) -> str:
    if key == "save_total_limit":
        return "all" if value is None else str(value)
    return "the default" if value is None else str(value)
