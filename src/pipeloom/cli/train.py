"""``pipeloom train``: read and validate a configuration, then train as one rank or launch the ranks."""

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pipeloom.chaos.fault import VARIABLE
from pipeloom.errors import InputError
from pipeloom.processes import launcher
from pipeloom.processes.launching.parents import end_with
from pipeloom.processes.launching.torchrun import end_agent
from pipeloom.processes.preemption import PREEMPTED, Request
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.elastic.options import CONFIGURED
from pipeloom.train.machine.compile_cache import without_empty_cache

if TYPE_CHECKING:
    from pipeloom.cli.common.parser import Parser

_DESCRIPTION = """\
Train a GPT on text through a pipeline, or fine-tune a model of Hugging Face. The defaults train a small model on two
ranks on Python's own source code.
The output directory holds metrics.jsonl, config.yaml, report.html, timeline.json.gz (for https://ui.perfetto.dev) and
checkpoint-N/. A resumed run does not take options from the checkpoint; pass --config OUTPUT_DIR/config.yaml."""
_EXAMPLES = """
pipeloom train
pipeloom train --parallel.pipeline 4 --schedule gpipe --batch.size 64 --batch.microbatches 16
pipeloom train --parallel.data 2 --parallel.data_strategy zero2 --precision.dtype bf16
pipeloom train --schedule auto
pipeloom train --parallel auto --processes 2
pipeloom train --data.path '/usr/share/doc/**/*.txt' --steps 1000 --output_dir runs/doc
pipeloom train --model.pretrained DIR --data.path 'chats/*.jsonl' --model.lora 16 --output_dir runs/chat
pipeloom train --config runs/doc/config.yaml --resume_from_checkpoint latest --steps 2000
pipeloom train --config runs/doc/config.yaml --seed 1 --output_dir runs/doc-seed1
torchrun --nproc-per-node 2 -m pipeloom train
"""
_VALIDATED = "_PIPELOOM_VALIDATED"  # variable: the configuration that the launcher read and validated, as JSON


@cache
def _parser() -> "Parser":
    from pipeloom.cli.common.train_options import make_parser

    return make_parser("pipeloom train", _DESCRIPTION, _EXAMPLES)


def parse(argv: Sequence[str]) -> TrainConfig:
    """The configuration that config files < environment < flags give; raises as `read_options`."""
    from pipeloom.cli.common.train_options import print_config, read_options, to_config

    values = read_options(_parser(), argv)
    config = to_config(values.as_dict())
    if values.print_config is not None:
        from pipeloom.train.config.automatic import without_plan
        from pipeloom.train.config.rules.settings import validate_settings

        validate_settings(without_plan(config))
        print_config(config, values.print_config)
        raise SystemExit(0)
    return config


def main(argv: Sequence[str]) -> int:
    """Validate the configuration, then train: as one rank, as all ranks, or as the launcher of the ranks.

    The launcher validates once and hands its ranks the configuration; a process of torchrun validates by itself.
    """
    if launcher.SERVER in os.environ:
        end_with(int(os.environ[launcher.LAUNCHED].split(":")[0]))
        _serve()
    member = launcher.membership(os.environ)
    if member is not None and VARIABLE in os.environ:
        from pipeloom.chaos.injector import inject

        inject(member, os.environ[VARIABLE])
    with launcher.last_words(member), without_empty_cache():  # validation may import torch
        with launcher.told_start(member):
            try:
                config, member = _configured(argv, member)
            except InputError:
                atexit.register(end_agent, dict(os.environ))  # behind the message
                raise
            launches = member is None and not config.local
            if not launches:
                from pipeloom.train.loop import train
        if launches:
            return _launch(config, argv)
        with without_empty_cache():
            code = PREEMPTED if train(config, member) else 0
    if member is not None:
        launcher.leave(code)
    return code


def _configured(
    argv: Sequence[str], member: launcher.Membership | None
) -> tuple[TrainConfig, launcher.Membership | None]:
    """The configuration of this process, which is valid, and its membership."""
    if member is not None and member.launched:
        config = TrainConfig.from_json(os.environ[_VALIDATED])
        return config, replace(member, configured=os.environ.get(CONFIGURED))
    from pipeloom.train.config.automatic import for_processes, without_plan
    from pipeloom.train.config.schedule import resolve_data_degree
    from pipeloom.train.config.validate import validate

    size, leads = member.world_size if member else None, member is None or member.rank == 0
    given = parse(argv)
    if given.elastic and member is not None:
        config, member = _fitted(for_processes(given, size), member)
    else:
        config = for_processes(resolve_data_degree(given, size), size)
    for line in validate(without_plan(config), world_size=size, leads=leads):
        if leads:
            print(line, flush=True)
    return config, member


def _serve() -> None:
    """Run as the fork server: import all that a rank needs; returns in each process that is forked for a rank."""
    import torch

    import pipeloom.train.loop
    from pipeloom.train.machine.without_dynamo import without_dynamo

    config = TrainConfig.from_json(os.environ[_VALIDATED])
    if config.model.pretrained is not None:
        import pipeloom.train.fine_tuning.model  # noqa: F401
    if config.compile:
        torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads torch._dynamo
    else:
        without_dynamo()
    place = launcher.fork_for_ranks(int(os.environ.pop(launcher.SERVER)))
    if place is None:
        launcher.leave(0)
    os.environ.update(place)
    if torch.cuda._is_in_bad_fork():  # an import has asked for GPUs, and a fork cannot use them any more
        os.execv(sys.executable, sys.orig_argv)


def _launch(config: TrainConfig, argv: Sequence[str]) -> int:
    from pipeloom.train.checkpoint.directory import clean, in_use
    from pipeloom.train.config.schedule import process_names

    output_dir = Path(config.output_dir)
    with in_use(output_dir):
        try:
            words = ["-m", "pipeloom", "train", *argv]
            variables = {_VALIDATED: config.to_json()}
            if config.elastic:
                from pipeloom.train.elastic.run import launch_elastic

                return launch_elastic(config, words, _VALIDATED)
            return launcher.launch(
                process_names(config),
                words,
                variables,
                request=Request(config.preempt_seconds),
                recoveries=config.max_recoveries if config.recover else 0,
                forks=True,
            )
        finally:
            clean(output_dir)  # of a save that the end cut short


def _fitted(config: TrainConfig, member: launcher.Membership) -> tuple[TrainConfig, launcher.Membership]:
    """The configuration for the processes that torchrun started this time, and what was given."""
    from pipeloom.train.elastic.layouts import fit_torchrun

    found = fit_torchrun(config, member.world_size)
    if member.rank == 0 and found.config != config:
        print(found.words, flush=True)
    return found.config, replace(member, configured=config.to_json())
