"""`slurm`: SLURM's own daemons on hosts of namespaces, one node per host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from tests.hosts.room import Room, room

MOST_SECONDS = 240.0  # from one state of a job to the next
_CONFIG = """\
ClusterName=test
SlurmctldHost={control}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/linear
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
NodeName={nodes} CPUs=2
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """A cluster with one node per host; commands run on the first host."""

    def __init__(self, hosts: Room, directory: Path) -> None:
        self.hosts, self._directory = hosts, directory
        self._environment = {
            **os.environ,
            "SLURM_CONF": str(directory / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",  # torchrun of this Python
        }

    def daemon(self, host: int, command: list[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        return self.hosts.hosts[host].start(command, log, self._environment)

    def call(self, *command: str, check: bool = True) -> str:
        """What a command prints; with `check`, it has to end with exit code 0."""
        log = self._directory / "calls.log"
        with log.open("w+b") as output:
            code = self.daemon(0, [*command], output).wait(MOST_SECONDS)
        printed = log.read_text()
        assert code == 0 or not check, f"{command} ends with {code}: {printed}\n{self.logs()}"
        return printed

    def submit(self, script: Path, *options: str) -> str:
        """The number of the job that ``sbatch SCRIPT`` starts; its files are beside the script."""
        printed = self.call("sbatch", f"--chdir={script.parent}", "--parsable", *options, str(script))
        return printed.split()[-1]

    def job(self, number: str) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        words = self.call("scontrol", "show", "job", number).split()
        return {name: value for name, equals, value in (word.partition("=") for word in words) if equals}

    def wait(self, number: str, **fields: str) -> dict[str, str]:
        """The job, once it has these fields."""
        deadline = time.monotonic() + MOST_SECONDS
        while not fields.items() <= (job := self.job(number)).items():
            assert time.monotonic() < deadline, f"{fields} expected: {job}\n{self.logs()}"
            time.sleep(0.5)
        return job

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in self._directory.glob("*d*.log"))


@contextmanager
def slurm(directory: Path) -> Iterator[Slurm]:
    """munged, slurmctld and two slurmd on two hosts, which end with the context."""
    (directory / "munge.key").write_bytes(os.urandom(128))
    (directory / "munge.key").chmod(0o400)
    with ExitStack() as stack:
        hosts = stack.enter_context(room(2, directory))
        nodes = [host.name for host in hosts.hosts]
        config = _CONFIG.format(control=nodes[0], nodes=",".join(nodes), directory=directory)
        (directory / "slurm.conf").write_text(config)
        cluster = Slurm(hosts, directory)
        files = [
            f"--{name}={directory}/munge.{name.partition('-')[0]}" for name in ("key-file", "pid-file", "seed-file")
        ]
        munged = ["munged", "--foreground", "--force", f"--socket={directory}/munge.socket", *files]
        for host, command in ((0, munged), (0, ["slurmctld", "-D"]), (0, ["slurmd", "-D"]), (1, ["slurmd", "-D"])):
            log = stack.enter_context((directory / f"{command[0]}-{host}.log").open("wb"))
            process = cluster.daemon(host, command, log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        deadline = time.monotonic() + MOST_SECONDS
        while (
            cluster.call("sinfo", "--noheader", "--partition=usual", "--format=%T %D", check=False).strip() != "idle 2"
        ):
            assert time.monotonic() < deadline, cluster.logs()
            time.sleep(0.2)
        yield cluster
