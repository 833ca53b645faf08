"""`pipeloom launch`: files that their readers accept, with the run unchanged; and ranks from schedulers' variables."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from zlib import crc32

import kubernetes_validate
import pytest
import yaml

from pipeloom import cli
from pipeloom.errors import InputError
from pipeloom.integrations.ray.run_files import RunFiles
from pipeloom.job_files import SCHEDULERS, Job, job_file
from pipeloom.processes.cluster_environment import first_host, with_rank
from pipeloom.processes.launcher import membership
from pipeloom.train.checkpoint.manifest import MANIFEST_NAME

TRICKY = (
    "script.py",
    "--name",
    'it\'s a "test" $HOME $(HOME) $$ `x` {{ y }}',
    "--empty=",
    "ünï: [1, 2]",
    "# no comment",
    "-1",
)


def of_cluster(*words: str, nodes: int = 2) -> Job:
    return Job(words=words, nodes=nodes, gpus_per_node=4, accelerator="H100", volume="runs", name="job-7")


def words_of(scheduler: str, text: str) -> list[str]:
    """What a file runs, as its reader sees it."""
    if scheduler in ("torchrun", "slurm"):
        found = subprocess.run(
            ["bash", "-c", _FAKES + text],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": "/usr/bin:/bin", "HEAD": "h"},
        )
        return found.stdout.removesuffix("\0").split("\0")
    if scheduler == "ray":
        lists = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.List)]
        return ast.literal_eval(lists[0])
    documents = list(yaml.safe_load_all(text))
    if scheduler == "kubernetes":
        return [_expanded(word) for word in documents[1]["spec"]["template"]["spec"]["containers"][0]["command"]]
    if scheduler == "kubeflow":
        return [_expanded(word) for word in documents[0]["spec"]["trainer"]["command"]]
    script = documents[0]["run"]
    environment = {
        "PATH": "/usr/bin:/bin",
        "SKYPILOT_NODE_IPS": "h\ni",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
    }
    found = subprocess.run(["bash", "-c", _FAKES + script], capture_output=True, text=True, check=True, env=environment)
    return found.stdout.removesuffix("\0").split("\0")


def _expanded(word: str) -> str:
    """As Kubernetes does with the words of a command."""
    return re.sub(r"\$(\$|\(HOME\))", lambda found: "$" if found[1] == "$" else "/root", word)


# Commands that print their arguments in place of running them.
_FAKES = """
exec() { "$@"; }
torchrun() { printf '%s\\0' "$@"; }
srun() { while [ "$1" != torchrun ]; do shift; done; "$@"; }
scontrol() { echo node0; echo node1; }
SLURM_JOB_ID=7 SLURM_JOB_NODELIST=x
"""


@pytest.mark.parametrize("scheduler", [name for name in SCHEDULERS if name != "ray"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_keeps_its_words(scheduler, nodes):
    text = job_file(scheduler, of_cluster(*TRICKY, nodes=nodes))
    assert tuple(words_of(scheduler, text)[-len(TRICKY) :]) == TRICKY


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_run_of_train_is_parsed_as_it_was_written(scheduler, capsys):
    run = ["train", "--parallel.pipeline", "8", "--model.layers", "8", "--output_dir", "/data/it's $x"]
    head = ["launch", scheduler, "--nodes", "2", "--gpus-per-node", "4", "--notice_seconds", "60"]
    head += {
        "skypilot": ["--accelerator=H100"],
        "kubernetes": ["--volume", "runs"],
        "kubeflow": ["--volume", "runs"],
    }.get(scheduler, [])
    assert cli.main([*head, "--", *run]) == 0
    added = ["--resume_from_checkpoint", "auto", "--preempt_seconds", "30"]
    whole = words_of(scheduler, capsys.readouterr().out)
    assert (
        whole[-len(run) - 3 :] == [*run[1:], *added] if scheduler == "ray" else whole[-len(run) - 4 :] == [*run, *added]
    )


def test_options_of_a_configuration_file_are_kept(tmp_path, capsys):
    file = tmp_path / "job.yaml"
    file.write_text("resume_from_checkpoint: /runs/checkpoint-500\npreempt_seconds: 77\n")
    assert cli.main(["launch", "slurm", "--gpus_per_node", "2", "--", "train", "--config", str(file)]) == 0
    assert words_of("slurm", capsys.readouterr().out)[-3:] == ["train", "--config", str(file)]


@pytest.mark.parametrize("nodes", [1, 3])
def test_kubernetes_accepts_the_manifest(nodes):
    documents = list(yaml.safe_load_all(job_file("kubernetes", of_cluster("script.py", nodes=nodes))))
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    service, job = documents
    pod = job["spec"]["template"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == nodes
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]  # gives the pods their names
    assert (
        f"--rdzv-endpoint={service['metadata']['name']}-0.{service['metadata']['name']}:29500"
        in pod["spec"]["containers"][0]["command"]
    )
    mounted = {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]} == {"shared-memory", "data"}


def test_pods_of_a_trainjob_have_the_volume_and_time_for_a_checkpoint():
    (document,) = yaml.safe_load_all(job_file("kubeflow", of_cluster("script.py")))
    (patch,) = document["spec"]["runtimePatches"]
    (pods,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = pods["template"]["spec"]["template"]["spec"]
    assert (pods["name"], pod["terminationGracePeriodSeconds"]) == ("node", 120)
    assert pod["volumes"] == [{"name": "data", "persistentVolumeClaim": {"claimName": "runs"}}]
    assert pod["containers"] == [{"name": "node", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]


def test_the_batch_script_asks_for_what_the_job_needs():
    lines = job_file("slurm", of_cluster("script.py")).splitlines()
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    expected = {
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "4",
        "cpus-per-task": "32",
        "signal": "B:USR1@120",
    }
    assert expected.items() <= asked.items()
    assert asked["time"] == "1-00:00:00"
    assert "requeue" in asked


@pytest.mark.parametrize(
    ("signalled", "to", "code", "state", "requeued"),
    [
        (None, "", 0, "RUNNING", False),
        (None, "", 1, "RUNNING", False),
        (signal.SIGUSR1, "script", 1, "RUNNING", True),  # before the time limit
        (signal.SIGUSR1, "script", 0, "RUNNING", False),  # in the last step
        (signal.SIGTERM, "node", 1, "RUNNING", True),  # pre-empted
        (signal.SIGTERM, "node", 1, "CANCELLED", False),
    ],
)
def test_a_batch_script_queues_its_job_again_after_a_signal(tmp_path, signalled, to, code, state, requeued):
    """srun, torchrun and scontrol are stand-ins: torchrun ends with 0 or 1, whatever it gets."""
    stand_ins = {
        "srun": 'while [ "$1" != bash ]; do shift; done; echo $$ > node; exec "$@"',
        "torchrun": f"trap '' USR1 TERM; touch runs; while [ ! -e go ]; do sleep 0.05; done; exit {code}",
        "scontrol": f'[ "$1" = requeue ] && touch requeued; echo JobState={state}',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(job_file("slurm", of_cluster("script.py")))
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x"}
    process = subprocess.Popen(["bash", str(script)], cwd=tmp_path, env=variables)
    try:
        waited_for((tmp_path / "runs").exists)
        if signalled is not None:
            process_id = process.pid if to == "script" else int((tmp_path / "node").read_text())
            os.kill(process_id, signalled)
            time.sleep(0.2)  # bash runs its trap
        (tmp_path / "go").touch()
        assert process.wait(20) == (75 if signalled is not None and code else code)
    finally:
        (tmp_path / "go").touch()
        process.kill()
        process.wait()
    assert (tmp_path / "requeued").exists() == requeued


def waited_for(condition):
    """Wait until a condition holds, at most 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_rays_program_is_python_with_all_workers():
    job = Job(words=("-m", "pipeloom", "train", "--a", 'b"c'), nodes=2, gpus_per_node=2, processes_per_node=4)
    tree = ast.parse(job_file("ray", job))
    keywords = {each.arg: each.value for node in ast.walk(tree) if isinstance(node, ast.Call) for each in node.keywords}
    assert ast.literal_eval(keywords["num_workers"]) == 8
    assert ast.literal_eval(keywords["resources_per_worker"]) == {"CPU": 4, "GPU": 0.5}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "--nodes", "2"], "nothing to run"),
        (["lsf", "--", "train"], "must be one of torchrun, slurm"),
        (["slurm", "--gpus_per_node", "2", "--", "trian"], "must be `train`, or a Python file"),
        (["slurm", "--nodes", "0", "--gpus_per_node", "1", "--", "a.py"], "nodes=0: must be at least 1"),
        (["slurm", "--", "a.py"], "Add --processes_per_node"),
        (["slurm", "--gpus_per_node", "2", "--name", "A b", "--", "a.py"], "name=A b: must be small letters"),
        (["slurm", "--gpus_per_node", "2", "--notice_seconds", "5", "--", "a.py"], "must be at least 30"),
        (
            ["slurm", "--gpus_per_node", "2", "--hours", "0.03", "--", "a.py"],
            "hours=0.03: the job would be told",
        ),
        (["skypilot", "--gpus_per_node", "2", "--", "a.py"], "Add --accelerator"),
        (["skypilot", "--gpus_per_node", "2", "--accelerator", "H100, x: y", "--", "a.py"], "must be letters, digits"),
        (["skypilot", "--processes_per_node", "2", "--gpus_per_node", "0", "--", "a.py", "b\nc"], "has a line break"),
        (
            ["slurm", "--gpus_per_node", "2", "--", "train", "--preempt_seconds", "500"],
            "preempt_seconds=500: the",
        ),
        (["ray", "--gpus_per_node", "2", "--", "a.py"], "starts `pipeloom train` alone"),
        (["slurm", "plan.json", "--gpus_per_node", "2", "--", "a.py"], "let a.py read it"),
        (
            ["slurm", "--nodes", "3", "--gpus_per_node", "2", "--", "train", "--parallel.pipeline", "4"],
            "6 processes for 4",
        ),
        (
            ["slurm", "--nodes", "2", "--gpus_per_node", "1", "--", "train"],
            "output_dir=runs/train: must be an absolute",
        ),
        (["kubernetes", "--gpus_per_node", "2", "--", "train"], "files of a pod are lost when it ends. Add --volume"),
        (["kubernetes", "--gpus_per_node", "2", "--volume", "v", "--", "train"], "an --output_dir in /data"),
        (["torchrun", "--gpus_per_node", "2", "--hours", "3", "--", "a.py"], "--hours 3.0: is for slurm alone. Remove"),
        (["ray", "--gpus_per_node", "2", "--volume", "v", "--", "train"], "is for kubernetes and kubeflow alone."),
        (["slurm", "--gpus_per_node", "2", "--", "train", "--scheduel", "1f1b"], "did you mean --schedule?"),
    ],
)
def test_wrong_input_is_one_line(words, said, capsys):
    assert cli.main(["launch", *words]) == 2
    output, error = capsys.readouterr()
    assert (output, error.count("\n")) == ("", 1)
    assert said in error


@pytest.mark.parametrize("equals", [True, False])
def test_pods_have_no_configuration_file_of_this_machine(tmp_path, capsys, equals):
    file = tmp_path / "job.yaml"
    file.write_text("steps: 3\n")
    run = ["train", "--output_dir", "/data/run", *([f"--config={file}"] if equals else ["--config", str(file)])]
    assert cli.main(["launch", "kubeflow", "--gpus_per_node", "2", "--volume", "runs", "--", *run]) == 2
    assert f"--config {file}: pods do not have this file. Give its options after --" in capsys.readouterr().err


STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[009-010,17]",
    "SLURM_PROCID": "4",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
}


def test_tasks_of_a_slurm_step_are_ranks():
    member = membership(STEP)
    assert (member.rank, member.world_size, member.local_rank, member.local_size) == (4, 5, 0, 1)
    assert member.meeting == f"tcp://gpu009:{20000 + crc32(b'41.2') % 20000}"
    assert membership({**STEP, "SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}).local_size == 2


def test_batch_scripts_and_single_tasks_are_no_ranks():
    batch = {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "5", "SLURM_PROCID": "0"}
    assert membership(batch) is None
    assert membership({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_torchrun_in_a_step_keeps_its_ranks():
    assert with_rank({**STEP, "RANK": "7", "WORLD_SIZE": "8"})["RANK"] == "7"
    assert membership({**STEP, "RANK": "7", "WORLD_SIZE": "8"}).meeting == "env://"


MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "781254657",
}


@pytest.mark.parametrize(
    ("more", "meeting"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}, "tcp://a:29500"),
        ({"OMPI_MCA_orte_hnp_uri": "781254656.0;tcp://192.0.2.2,10.0.0.2:45243;tcp6://[fd00::2]:46503"}, "192.0.2.2"),
        ({"PMIX_NAMESPACE": "prterun-node-7-4711@1"}, "node-7"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1"),
        (STEP, None),  # a step of mpirun's helpers
    ],
)
def test_processes_of_mpirun_are_ranks(more: dict[str, str], meeting: str | None) -> None:
    environment = {**MPI, **more}
    if meeting is None:
        with pytest.raises(InputError, match="MASTER_ADDR and MASTER_PORT are not set"):
            membership(environment)
        return
    member = membership(environment)
    assert (member.rank, member.world_size, member.local_rank) == (3, 4, 1)
    port = 20000 + crc32(environment["PMIX_NAMESPACE"].encode()) % 20000
    assert member.meeting == (meeting if "//" in meeting else f"tcp://{meeting}:{port}")


def test_processes_of_mpich_are_ranks_on_one_host() -> None:
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    member = membership(mpich)
    assert (member.rank, member.world_size, member.local_rank, member.local_size) == (1, 2, 1, 2)
    assert member.meeting.startswith("tcp://127.0.0.1:")
    assert membership({**mpich, "PMI_SIZE": "1", "PMI_RANK": "0"}) is None
    with pytest.raises(InputError, match="mpiexec -genv MASTER_ADDR"):
        membership({**mpich, "PMI_SIZE": "4"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("gpu[007-012,15],x", "gpu007"),
        ("r[1,3]-ib", "r1-ib"),
        ("rack[1-2]node[3-4],x", "rack1node3"),
        ("n[05]", "n05"),
    ],
)
def test_the_first_host_of_slurms_list(hosts, first):
    assert first_host(hosts) == first


def test_printing_a_file_loads_no_torch():
    words = "launch slurm --gpus_per_node 2 -- train --parallel.pipeline 2 --output_dir /x"
    code = f"import sys; from pipeloom import cli; cli.main({shlex.split(words)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def _save(directory: Path, step: int) -> None:
    (directory / f"checkpoint-{step}").mkdir()
    (directory / f"checkpoint-{step}" / MANIFEST_NAME).touch()


def test_rows_and_checkpoints_of_a_run_are_reported_once_in_order(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 3.5}\n{"step": 2, "loss": 3.25}\n')
    _save(tmp_path, 1)
    files = RunFiles(tmp_path)
    assert files.news() == []
    assert RunFiles(tmp_path, since=0).news()[0] == ({"step": 1, "loss": 3.5}, str(tmp_path / "checkpoint-1"))
    assert RunFiles(tmp_path, since=1).news() == [({"step": 2, "loss": 3.25}, None)]
    renewed = tmp_path / "new"  # the run goes on from step 1
    renewed.write_text('{"step": 1, "loss": 3.5}\n{"step": 2, "loss": 3.25, "memory": [1]}\n{"step": 3, "lo')
    renewed.replace(metrics)
    assert files.news() == [({"step": 2, "loss": 3.25}, None)]
    for step in (10, 4, 3):
        _save(tmp_path, step)
    with metrics.open("a") as file:
        file.write('ss": 3.0}\n{"step": 3, "eval_loss": 2.5}\n{"step": 5, "loss": 2.0}\n')
    saved = {step: str(tmp_path / f"checkpoint-{step}") for step in (3, 4, 10)}
    assert files.news() == [
        ({"step": 3, "eval_loss": 2.5}, saved[3]),
        ({"step": 4}, saved[4]),
        ({"step": 10}, saved[10]),
    ]
    assert files.news() == []
