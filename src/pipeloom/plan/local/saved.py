"""The saved measurement of this machine: where it is, and whether it still fits. No torch here."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeloom.common.cores import usable_cores
from pipeloom.common.json_reader import parse_file
from pipeloom.errors import InputError
from pipeloom.plan.cluster import Cluster, parse_cluster

LOCAL = "local"
COMMAND = "pipeloom doctor --measure"


def local_path() -> Path:
    """The file of cluster ``local``: ``pipeloom/local.json`` in the user's cache directory (XDG_CACHE_HOME)."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "pipeloom" / "local.json"


def local_cluster(option: str) -> Cluster:
    """The measurement of this machine.

    Args:
        option: that asks for it, for error messages.

    Raises:
        InputError: there is none.
    """
    path = local_path()
    if not path.exists():
        raise InputError(f"{option}=local: this machine is not measured yet. Run `{COMMAND}`, which takes a minute.")
    return parse_file(option, path, parse_cluster)


def notices(cluster: Cluster) -> list[str]:
    """When and where a cluster was measured, and what has changed since; empty where it was not measured."""
    found = cluster.measured
    if found is None:
        return []
    lines = [
        f"cluster {cluster.name}: measured {found.date} on {found.machine}, {found.cores} cores, torch {found.torch}"
    ]
    if cluster.name != LOCAL:
        return lines
    now = {"machine": platform.node(), "cores": usable_cores(), "torch": torch_version()}
    changed = [
        f"{name} {getattr(found, name)} -> {value}" for name, value in now.items() if getattr(found, name) != value
    ]
    if changed:
        lines.append(f"cluster {cluster.name}: changed since: {', '.join(changed)}. Run `{COMMAND}` again.")
    return lines


def torch_version() -> str:
    """The version of the installed torch."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed"
