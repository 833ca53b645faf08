"""`pipeloom chaos`: injects faults into a training job, resumes it, and compares it with a reference run."""

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from pipeloom.chaos.campaign import Campaign, Job, Result
from pipeloom.chaos.fault import BY_ITSELF, ELASTIC, KINDS
from pipeloom.chaos.table import HEADINGS, markdown, row, summary, to_json
from pipeloom.cli.common.parser import Parser, did_you_mean
from pipeloom.common.atomic_file import write_named
from pipeloom.common.quantities import table_lines
from pipeloom.errors import InputError
from pipeloom.processes.hang_report import patient_seconds
from pipeloom.train.config.train_config import AUTO, TrainConfig
from pipeloom.version import __version__

_LEAST_SAVES = 3  # flips need a good checkpoint before the damaged one, and the last one is compared
_KINDS = ",".join(kind for kind in KINDS if kind not in BY_ITSELF)


def main(argv: Sequence[str]) -> int:
    """Run the campaign and show it; returns 0 if faults struck, and every run came out as the reference run."""
    given = _parser().parse_args(list(argv)).as_dict()
    kinds = _kinds(given["kinds"])
    if given["kills"] < 1:
        raise InputError(f"--kills={given['kills']}: must be at least 1.")
    if ELASTIC in kinds and given["launcher"] == "torchrun":
        raise InputError(f"--kinds {ELASTIC}: torchrun starts as many ranks again. Use --launcher own.")
    config = _config(given["config"])
    options = (f"--config={Path(given['config']).absolute()}", *_own_options(config, given["watchdog_seconds"]))
    with ExitStack() as stack:
        # SIGTERM ends a campaign as Ctrl-C does, with its runs.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        if given["out"] is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeloom-chaos-runs-")))
        else:
            out = Path(given["out"]).absolute()
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise InputError(f"--out={given['out']}: is not an empty directory. Name another one.")
        own = config.watchdog_seconds  # else hangs that last for minutes would be a surprise
        longest = 0.0 if own is None else patient_seconds(given["watchdog_seconds"] or own)
        campaign = Campaign(Job(options, config.num_processes, given["launcher"], longest), out)
        results: list[Result] = []
        try:
            for result in campaign.run(given["kills"], given["seed"], kinds):
                results.append(result)
                if not given["json"]:
                    _, kind, rank, where, *others = row(result)
                    print(
                        f"{result.number}/{given['kills']}  {kind} of rank {rank} in {where}: {', '.join(others)}",
                        flush=True,
                    )
        finally:  # also where the campaign is interrupted
            if results:
                _show(given, campaign, results)
            elif given["out"] is not None:  # the reference run has failed: the same command can be given again
                shutil.rmtree(out, ignore_errors=True)
    struck = any(result.where is not None for result in results)
    return 0 if struck and all(result.good for result in results) else 1


def _show(given: dict[str, Any], campaign: Campaign, results: list[Result]) -> None:
    options = " ".join(f"--{name} {given[name]}" for name in ("kills", "seed", "kinds", "launcher"))
    good, seconds = sum(result.good for result in results), campaign.reference_seconds
    facts = [
        f"`pipeloom chaos {given['config']} {options}`, pipeloom {__version__}, {os.cpu_count()} cores",
        f"{good} of {len(results)} runs came out bitwise as the reference run ({seconds:.1f} s) and left nothing",
    ]
    told = {"seed": given["seed"], "launcher": given["launcher"], "reference_seconds": campaign.reference_seconds}
    text = json.dumps({**told, "good": good, "faults": [to_json(result) for result in results]}, indent=1)
    if given["out"] is not None:
        page = markdown("Fault campaign", facts, results)
        for name, content in (("chaos.md", page), ("chaos.json", text + "\n")):
            write_named("--out", str(Path(given["out"], name)), content)
    if given["json"]:
        print(text)
        return
    print("\n" + "\n".join(table_lines([HEADINGS, *map(row, results)])))
    print("\n" + "\n".join([*summary(results), facts[1]]))


def _parser() -> Parser:
    parser = Parser(
        prog="pipeloom chaos",
        description="Run the training job of a configuration once as a reference, then once per injected fault, at a "
        "random action, rank and phase.\nEach run is resumed as a user would (--resume_from_checkpoint auto), and "
        "compared: losses, weights and optimizer state must be bitwise those of the reference run, and nothing may be "
        "left behind.",
        examples="""
            pipeloom chaos job.yaml --kills 20 --seed 1 --out runs/chaos
            pipeloom chaos job.yaml --kills 8 --kinds kill,save-kill,flip --json
            pipeloom chaos job.yaml --kills 50 --kinds stop,loop,lock --watchdog_seconds 3
        """,
    )
    option = parser.add_argument
    option("config", type=str, metavar="CONFIG", help="YAML file with options of pipeloom train")
    option("--kills", type=int, default=10, help="number of faults, each in a run of its own")
    option("--seed", type=int, default=0, help="seed of the fault locations")
    option(
        "--kinds",
        type=str,
        default=_KINDS,
        metavar="NAME,..",
        help=f"kinds of faults, equally often (default: all but {', '.join(BY_ITSELF)})",
    )
    launcher = "what starts the ranks: own, or torchrun with restarts"
    option("--launcher", type=Literal["own", "torchrun"], default="own", help=launcher)
    option(
        "--watchdog_seconds",
        type=float | None,
        help="watchdog limit of each run in seconds (default: the configuration's, or 5)",
    )
    option("--out", type=str, metavar="DIR", help="directory for chaos.md, chaos.json, logs and failed runs")
    option("--json", action="store_true", help="output as one JSON object")
    return parser


def _kinds(text: str) -> list[str]:
    found = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in found:
        if word not in KINDS:
            hint = did_you_mean(word, KINDS)
            raise InputError(
                f"--kinds={text}: {word!r} is unknown: the kinds are {', '.join(KINDS)}{hint and '; ' + hint}."
            )
    return found


def _config(path: str) -> TrainConfig:
    """The configuration of the job. Raises InputError where a campaign cannot run it."""
    from pipeloom.cli.train import parse

    config = parse([f"--config={path}"])
    if config.local:
        raise InputError("local=true: a campaign injects faults into processes. Remove local.")
    if config.parallel.auto or config.replan:
        raise InputError("parallel.auto: each run of a campaign must have the same plan. Name the degrees.")
    if config.schedule == AUTO:
        raise InputError("schedule=auto: each run of a campaign must have the same schedule. Name a schedule.")
    if config.parallel.data < 0:
        raise InputError("parallel.data=-1: a campaign needs the number of processes. Give a number.")
    if not config.save_steps or config.steps // config.save_steps < _LEAST_SAVES:
        raise InputError(
            f"save_steps={config.save_steps}: a campaign needs at least {_LEAST_SAVES} checkpoints in "
            f"{config.steps} steps. Lower it."
        )
    return config


def _own_options(config: TrainConfig, watchdog_seconds: float | None) -> list[str]:
    """What a campaign sets in each run."""
    seconds = watchdog_seconds or config.watchdog_seconds or 5.0
    kept = config.save_total_limit
    limit = [] if kept is None else [f"--save_total_limit={max(2, kept)}"]
    watched = [f"--watchdog_seconds={seconds:g}", "--watchdog=true"]
    return ["--log_steps=1", "--report_to=none", *watched, *limit]
