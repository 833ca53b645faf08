"""Tests with real schedulers. Without the scheduler of a test it is skipped, and says what is missing."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent
_PROGRAMS = {"test_slurm.py": ("sbatch", "srun", "slurmctld", "slurmd", "munged")}
_PACKAGES = {
    "test_ray.py": ("ray", "ray[train]"),
    "test_skypilot.py": ("sky", "skypilot"),
    "test_kubeflow.py": ("kubeflow_trainer_api", "kubeflow-trainer-api"),
}


def _missing(module: str) -> str | None:
    """What a module of tests lacks on this machine; None: nothing."""
    for program in _PROGRAMS.get(module, ()):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            return f"no {program} on this machine: apt-get install slurm-wlm munge"
    if module in _PROGRAMS and os.geteuid():
        return "slurmctld, slurmd and hosts of namespaces need root"
    if module in _PACKAGES and find_spec(_PACKAGES[module][0]) is None:
        return f"no module {_PACKAGES[module][0]}: pip install '{_PACKAGES[module][1]}'"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FOLDER in item.path.parents and (reason := _missing(item.path.name)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
