"""``pipeloom checkpoint convert --plan``: its rules and its output."""

from pathlib import Path
from typing import Any

from pipeloom.cli.common.planning import train_command
from pipeloom.cli.common.train_options import difference
from pipeloom.cli.common.upcycling import check_no_upcycling
from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.common.quantities import bytes_text, counted
from pipeloom.errors import InputError
from pipeloom.plan.train_options import PLANNED
from pipeloom.train.config.train_config import TrainConfig, flat

_KEPT = ("batch.size", "precision.dtype", "precision.gradients")  # options of a run that a plan may leave to it


def print_resharded(options: Any) -> int:
    """Write the checkpoint in the layout of the plan, and print where it is and how to train it."""
    for name in ("ranks", "single", "config", "upcycle"):
        value = getattr(options, name)
        if value not in (None, False):
            given = f"--{name}" if value is True else f"--{name} {value}"
            raise InputError(f"{given}: does not work with --plan, which writes a whole checkpoint. Remove it.")
    check_no_upcycling(options)
    from pipeloom.train.resharding import reshard  # loads torch

    found = reshard(
        Path(options.dir), Path(options.plan), Path(options.out), CheckpointKey.read(options.checkpoint_key_file)
    )
    files = [path for path in found.path.iterdir() if path.is_file()]
    size = bytes_text(sum(path.stat().st_size for path in files))
    ranks = counted(found.num_processes, "rank")
    print(f"{found.path}: step {found.step}, {ranks}, {counted(len(files), 'file')}, {size}")
    chosen = {"plan": options.plan, "output_dir": options.out, "resume_from_checkpoint": "latest"}
    if options.checkpoint_key_file is not None:
        chosen["checkpoint_key_file"] = options.checkpoint_key_file
    changed = dict(flat(difference(found.config.to_mapping(), TrainConfig().to_mapping())))
    from_plan = set(PLANNED) - set(_KEPT)
    chosen |= {key: value for key, value in changed.items() if key not in chosen and key not in from_plan}
    print(f"train it: {train_command(chosen)}")
    return 0
