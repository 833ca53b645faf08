"""`pipeloom launch`: the file that starts a run on a cluster."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeloom.cli.common.parser import Parser
from pipeloom.common.atomic_file import write_named
from pipeloom.errors import InputError
from pipeloom.job_files import SCHEDULERS, Job, job_file

_EXAMPLES = """\
pipeloom launch slurm --nodes 2 --gpus_per_node 2 -- train --parallel.pipeline 4 --output_dir /shared/run
pipeloom launch slurm plan.json --nodes 4 --gpus_per_node 8 -- train --config model.yaml --output_dir /shared/run
pipeloom launch kubernetes --gpus_per_node 2 --image me/pipeloom --volume runs -- train --output_dir /data/run
pipeloom launch torchrun --nodes 2 --processes_per_node 4 -- my_script.py --epochs 3
"""
_PODS, _VOLUME = ("kubernetes", "kubeflow"), Path("/data")
_NOTICE_MARGIN = 30  # seconds between the end of a save and the end of the job


def main(argv: Sequence[str]) -> int:
    """Print the file, or write it; returns the exit code."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    own, run = [_with_underscores(word) for word in words[:at]], words[at + 1 :]
    options = _parser().parse_args(own)
    if options.scheduler not in SCHEDULERS:
        raise InputError(f"scheduler {options.scheduler!r}: must be one of {', '.join(SCHEDULERS)}.")
    for name, schedulers in _OF_SOME.items():
        if options.scheduler not in schedulers and getattr(options, name) != _OPTIONS[name].get("default"):
            raise InputError(f"--{name} {getattr(options, name)}: is for {' and '.join(schedulers)} alone. Remove it.")
    job = Job(words=_words(options, run), **{name: getattr(options, name) for name in _OPTIONS})
    if run[0] == "train":
        job = _checked(job, options.scheduler)
    text = job_file(options.scheduler, job)
    if options.out is None:
        sys.stdout.write(text)
        return 0
    write_named("--out", options.out, text)
    usual, command = SCHEDULERS[options.scheduler]
    print(f"wrote {options.out}. Start it with: {command.replace(usual, options.out)}")
    return 0


_OF_SOME = {
    "hours": ("slurm",),
    "image": _PODS,
    "volume": _PODS,
    "accelerator": ("skypilot",),
    "storage": ("ray",),
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "nodes": {"type": int, "default": 1, "help": "number of nodes"},
    "gpus_per_node": {"type": int, "default": 0, "help": "GPUs per node; 0: CPUs compute"},
    "processes_per_node": {"type": int | None, "help": "processes per node (default: one per GPU)"},
    "cpus_per_node": {"type": int | None, "help": "CPUs per node (default: 8 per GPU, or one per process)"},
    "name": {"type": str, "default": "pipeloom", "help": "name of the job"},
    "hours": {"type": float, "default": 24.0, "help": "time limit (slurm)"},
    "notice_seconds": {
        "type": int,
        "default": 120,
        "help": "seconds from the scheduler's signal to the end of the job, for a checkpoint",
    },
    "restarts": {"type": int, "default": 3, "help": "maximum number of restarts after a failure"},
    "port": {"type": int, "default": 29500, "help": "rendezvous port (slurm: chosen by the number of the job)"},
    "image": {
        "type": str,
        "default": "pipeloom:latest",
        "help": "container image with pipeloom (kubernetes, kubeflow)",
    },
    "volume": {"type": str | None, "help": "persistent volume claim, mounted at /data (kubernetes, kubeflow)"},
    "accelerator": {"type": str | None, "help": "kind of GPU, such as H100 (skypilot)"},
    "storage": {"type": str | None, "help": "directory or URI for results that all nodes reach (ray)"},
}


def _parser() -> Parser:
    parser = Parser(
        "pipeloom launch",
        "Print the file that starts `pipeloom train`, or a script with `pl.Pipeline`, on the nodes of a cluster. "
        "Arguments after -- are the command that each process runs: `train` and its options, or a Python file and its "
        "arguments. Runs of `train` resume from their newest checkpoint when they are started again.",
        examples=_EXAMPLES,
    )
    parser.add_argument("scheduler", type=str, metavar="SCHEDULER", help=", ".join(SCHEDULERS))
    parser.add_argument("plan", type=str | None, nargs="?", metavar="PLAN", help="plan.json for train")
    for name, settings in _OPTIONS.items():
        parser.add_argument(f"--{name}", **settings)
    parser.add_argument("--out", type=str | None, metavar="FILE", help="write the file, in place of printing it")
    return parser


def _with_underscores(word: str) -> str:
    """``--gpus_per_node`` for ``--gpus-per-node``, which torchrun and schedulers have taught people to write."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word


def _words(options: Any, run: list[str]) -> tuple[str, ...]:
    """What each process runs."""
    if not run:
        raise InputError("nothing to run: put `-- train ...` or `-- script.py ...` at the end of the command.")
    if run[0] != "train":
        if not run[0].endswith(".py"):
            raise InputError(f"{run[0]!r} after --: must be `train`, or a Python file that ends with .py.")
        if options.plan is not None:
            raise InputError(f"plan {options.plan}: is for `-- train` alone. Remove it, and let {run[0]} read it.")
        return tuple(run)
    words = ["-m", "pipeloom", *run]
    if options.plan is not None:
        words += ["--plan", options.plan]
    return tuple(words)


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """``b`` for the option ``--a`` among words such as ``--a b`` or ``--a=b``."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.partition("=")[0] == option:
            return word.partition("=")[2] or following
    return None


def _checked(job: Job, scheduler: str) -> Job:
    """The job with the options of a run that resumes; checks those of `pipeloom train`. Raises InputError."""
    from pipeloom.cli.train import parse
    from pipeloom.train.config.automatic import for_processes, without_plan
    from pipeloom.train.config.rules.settings import check_sizes, validate_settings
    from pipeloom.train.config.schedule import resolve_data_degree
    from pipeloom.train.config.train_config import TrainConfig
    from pipeloom.train.config.validate import check_processes

    config = for_processes(resolve_data_degree(parse(job.words[3:]), job.world_size), job.world_size)
    check_sizes(config)
    validate_settings(without_plan(config))
    check_processes(config, job.world_size)
    if scheduler in _PODS:
        if job.volume is None or not Path(config.output_dir).is_relative_to(_VOLUME):
            raise InputError(
                f"output_dir={config.output_dir}: files of a pod are lost when it ends. Add --volume CLAIM, and "
                f"after -- an --output_dir in {_VOLUME}."
            )
        for option in ("--plan", "--config"):
            name = _value_of(option, job.words)
            if name is not None:
                raise InputError(
                    f"{option} {name}: pods do not have this file. Give its options after --; `pipeloom train "
                    f"{option} {name} --print_config skip_default` lists them."
                )
    if (scheduler == "ray" or job.nodes > 1) and not Path(config.output_dir).is_absolute():
        raise InputError(
            f"output_dir={config.output_dir}: must be an absolute path that all nodes share. Add --output_dir after --."
        )
    if config.preempt_seconds > job.notice_seconds and config.preempt_seconds != TrainConfig().preempt_seconds:
        raise InputError(
            f"preempt_seconds={config.preempt_seconds:g}: the ranks are killed {job.notice_seconds} s after the signal "
            "(--notice_seconds). Use fewer, or more --notice_seconds before --."
        )
    words = list(job.words)
    if config.resume_from_checkpoint is None:
        words += ["--resume_from_checkpoint", "auto"]
    if config.preempt_seconds == TrainConfig().preempt_seconds:
        words += ["--preempt_seconds", str(max(job.notice_seconds - _NOTICE_MARGIN, job.notice_seconds // 2))]
    return replace(job, words=tuple(words))
