"""Rewinds: after a spike, a run goes on from its last checkpoint and passes over the samples since then.

``rewinds.json`` in the output directory has all rewinds of a run. It is written before the run goes back, and read
whenever a checkpoint of this directory is loaded, so a run that is killed and resumed passes over the same samples.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pipeloom.common.atomic_file import write_whole
from pipeloom.common.json_reader import parse_json
from pipeloom.data.sampler import Sampler
from pipeloom.errors import CheckpointError, RunError
from pipeloom.processes.agreement import together
from pipeloom.train.checkpoint.resume import find_good
from pipeloom.train.data.written import REWINDS_NAME
from pipeloom.train.output.saved_state import MOST_SAMPLES, check_saved_state
from pipeloom.train.run_parts import RunParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """One rewind.

    Attributes:
        checkpoint: the step of the checkpoint that the run went back to.
        step: the step with the spike.
        spike: the values above their limits.
        start, stop: positions in the order of samples; those from `start` on and before `stop` are passed over.
        num_windows, seed: of the sampler, which determine the order.
    """

    checkpoint: int
    step: int
    spike: str
    start: int
    stop: int
    num_windows: int
    seed: int

    @classmethod
    def from_dict(cls, row: object) -> Self:
        """Raises ValueError for a row that `asdict` did not make."""
        names = cls.__dataclass_fields__
        if not isinstance(row, dict) or row.keys() != names.keys():
            raise ValueError(f"an entry must have the keys {', '.join(names)}")
        numbers = {name: value for name, value in row.items() if name != "spike"}
        if not isinstance(row["spike"], str) or any(
            type(value) is not int or not 0 <= value < MOST_SAMPLES for value in numbers.values()
        ):
            raise ValueError("an entry must have integers of at least 0, and a string as spike")
        if row["start"] >= row["stop"]:
            raise ValueError("start must be below stop")
        return cls(**row)

    def is_known_to(self, sampler: Mapping[str, Any]) -> bool:
        """Whether a checkpoint passes over these samples, so that it was saved after this rewind.

        Args:
            sampler: the state of the sampler in the checkpoint.
        """
        return (self.num_windows, self.seed) == (sampler["num_windows"], sampler["seed"]) and any(
            start <= self.start and self.stop <= stop for start, stop in sampler.get("passed_over", ())
        )


def read_rewinds(directory: Path) -> list[Rewind]:
    """The rewinds of a run, in order; none without a file.

    Raises:
        CheckpointError: the file is damaged: which samples the run passes over is not known.
    """
    path = directory / REWINDS_NAME
    try:
        rows = parse_json(path.read_bytes())
        if not isinstance(rows, list):
            raise ValueError("must be a list")
        return [Rewind.from_dict(row) for row in rows]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{path} cannot be read ({reason}): it has the samples that this run passes over. Restore the file, or "
            "delete it to train on them."
        ) from error


def with_rewinds(sampler: Sampler, rewinds: Sequence[Rewind]) -> Sampler:
    """A sampler that also passes over the samples of the rewinds that are of its order."""
    more = [(each.start, each.stop) for each in rewinds if (each.num_windows, each.seed) == sampler.order]
    return sampler.without(more)


def rewind(run: RunParts, step: int, spike: str) -> tuple[Path | None, str]:
    """Record a rewind; every process calls it, after a step whose update was left out.

    Args:
        run: this process's part.
        step: the step with the spike.
        spike: the values above their limits.

    Returns:
        The newest good checkpoint, from which the run goes on, and lines to show. Without a checkpoint in the output
        directory yet: None.

    Raises:
        RunError: the run went back to this checkpoint ``spike_rewinds`` times before.
        CheckpointError: all checkpoints are damaged, or ``rewinds.json`` cannot be read or written.
    """
    run.journal.enter(f"rewind after step {step}")
    failed = f"step {step}  {spike}; the run cannot go back to its last checkpoint"
    path, text, limited = together(lambda: _record(run, step, spike), run.group.all_gather, failed=failed)[0]
    if limited:
        raise RunError(text)
    return None if path is None else Path(os.fsdecode(bytes.fromhex(path))), text


def _record(run: RunParts, step: int, spike: str) -> tuple[str | None, str, bool]:
    """On process 0: the checkpoint as hexadecimal bytes, a line, and whether there were too many rewinds."""
    if run.group.rank:
        return None, "", False
    directory, sampler, most = run.output_dir, run.sampler, run.config.spike_rewinds
    found = find_good("auto", directory, leads=True, key=run.checkpoint_key)
    if found is None:
        return None, f"step {step}  {spike}; update left out, because this run has no checkpoint yet", False
    path, manifest = found.path, found.manifest
    check_saved_state(path, manifest.state)
    saved = manifest.state["sampler"]
    same_order = (saved["num_windows"], saved["seed"]) == sampler.order
    first = saved["samples_seen"] if same_order else 0
    span = (sampler.position(first)[0], sampler.position(run.samples_seen - 1)[0] + 1)
    rewinds = read_rewinds(directory)
    number = 1 + sum(each.checkpoint == manifest.step and not each.is_known_to(saved) for each in rewinds)
    if number > most:
        text = (
            f"step {step} has {spike}: the run went back to {path} {most} times, and spike_rewinds={most}. Resume "
            "from an earlier checkpoint with a lower optimizer.learning_rate, or with on_spike=skip, or with more "
            "spike_rewinds."
        )
        return None, text, True
    numbers = dict(zip(("start", "stop", "num_windows", "seed"), (*span, *sampler.order), strict=True))
    made = Rewind(checkpoint=manifest.step, step=step, spike=spike, **numbers)
    write_whole(directory / REWINDS_NAME, json.dumps([asdict(each) for each in (*rewinds, made)], indent=1) + "\n")
    text = (
        f"step {step}  {spike}; back to {path}, passing over samples {span[0] + 1} to {span[1]} "
        f"(rewind {number} of at most {most})"
    )
    return os.fsencode(path).hex(), "\n".join([*found.notices, text]), False
