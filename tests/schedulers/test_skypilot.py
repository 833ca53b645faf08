"""Tasks of `pipeloom launch skypilot` as SkyPilot's own loader reads them.

Needs SkyPilot: the extra `skypilot`, in an environment without the extra `dev`, since SkyPilot and transformers ask for
different versions of click. No cloud, no account and no network are needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeloom.job_files import Job, job_file

_READ = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(found,) = task.resources
gpus, cpus = found.accelerators, found.cpus
print("read:", json.dumps([task.name, task.num_nodes, gpus, cpus, task.workdir, task.setup, task.run]))
"""


@pytest.mark.parametrize(
    ("more", "gpus", "cpus"),
    [({"gpus_per_node": 8, "accelerator": "H100"}, {"H100": 8}, "64+"), ({"processes_per_node": 2}, None, "2+")],
)
def test_skypilot_reads_the_task(more: dict[str, Any], gpus: dict[str, int] | None, cpus: str, tmp_path: Path) -> None:
    job = Job(words=("script.py", "--name", 'a: "b" #c'), nodes=2, name="job-7", **more)
    (tmp_path / "job.sky.yaml").write_text(job_file("skypilot", job))
    environment = {**os.environ, "HOME": str(tmp_path)}  # for the files of SkyPilot
    command = [sys.executable, "-c", _READ, "job.sky.yaml"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    line = found.stdout.splitlines()[-1].removeprefix("read: ")
    name, nodes, accelerators, read_cpus, workdir, setup, run = json.loads(line)
    assert (name, nodes, accelerators, read_cpus) == ("job-7", 2, gpus, cpus)
    assert Path(tmp_path, workdir) == tmp_path
    assert setup == "pip install pipeloom\n"
    assert '--node-rank "$SKYPILOT_NODE_RANK"' in run
    assert run.endswith("script.py --name 'a: \"b\" #c'\n")
