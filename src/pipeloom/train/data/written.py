"""What runs write, so that the text of a run has no output of runs."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from pipeloom.common.process_place import PROCESSES_NAME
from pipeloom.data.files import Writer
from pipeloom.train.checkpoint.manifest import SEAL_NAME

CONFIG_HEAD = "# pipeloom "  # the first characters of config.yaml in an output directory

MODEL_DIR = "model"  # of a fine-tuned model, in an output directory

# What a run writes. An output directory may also have text files of the user.
PLAN_NAME, PLAN_TIMES_NAME = "plan.json", "plan_times.json"
REWINDS_NAME = "rewinds.json"
RUN_FILES = (
    *(PLAN_NAME, PLAN_TIMES_NAME),
    *("metrics.jsonl", "config.yaml", "environment.json", "memory.json", "report.html", PROCESSES_NAME),
    *("timelines.json", "timeline.json.gz", "tracking.json", "tensorboard", REWINDS_NAME),
    MODEL_DIR,
)
_WRITTEN = re.compile(f"{'|'.join(map(re.escape, RUN_FILES))}|data|checkpoint-\\d+|previous-\\d+")


def writer_in(output_dir: Path | None) -> Callable[[Path], Writer]:
    """From the base directory of data, a function that returns the directory of the run that wrote a file, or None.

    A run has written the files of `output_dir` and of other output directories, recognized by their config.yaml. If the
    base is inside such a directory, only the files that runs write count.
    """
    return lambda root: _writer(root, output_dir)


def _writer(root: Path, output_dir: Path | None) -> Writer:
    real_root, real_output_dir = root.resolve(), output_dir and output_dir.resolve()
    is_output = cache(_is_output)

    def is_written(file: Path, place: Path, root: Path) -> bool:
        """Whether the run in `place` wrote `file`; decided by the name if `root` is inside `place`."""
        if not file.is_relative_to(place):
            return False
        return not root.is_relative_to(place) or bool(_WRITTEN.fullmatch(file.relative_to(place).parts[0]))

    def writer(file: Path) -> Path | None:
        real = file.resolve()
        if real_output_dir is not None and is_written(real, real_output_dir, real_root):
            return output_dir
        places = [place for place in reversed(file.parents) if place.is_relative_to(root)]
        of_runs = (place for place in places if is_output(place) and is_written(file, place, root))
        return next(of_runs, None)

    return writer


def _is_output(directory: Path) -> bool:
    """Whether a directory is an output directory or a checkpoint of pipeloom."""
    try:
        with open(directory / "config.yaml", encoding="utf-8", errors="replace") as file:
            if file.read(len(CONFIG_HEAD)) == CONFIG_HEAD:
                return True
    except OSError:
        pass
    return (directory / SEAL_NAME).is_file()
