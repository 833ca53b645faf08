"""The model of a run: described everywhere, made only where it is needed."""

from __future__ import annotations

import dataclasses
import json

import torch

from pipeloom.ir import Schedule
from pipeloom.models import GPT, GPTConfig, loss_fn, materialize
from pipeloom.split import Stages, split
from pipeloom.train.checkpoint.exchange import Exchange
from pipeloom.train.config.schedule_choice import parse_cut
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.sampler import Corpus


def build_stages(
    config: TrainConfig,
    schedule: Schedule,
    corpus: Corpus,
    exchange: Exchange,
    device: torch.device,
    rank: int | None,
) -> Stages:
    """The model cut into stages; those of `rank` have values, the others are on the meta device.

    Initial values depend on the seed and a parameter's name alone, so every layout begins with the same model.

    Args:
        config, schedule, corpus: of the run.
        exchange: with all processes.
        device: where values are to lie.
        rank: of the pipeline, that this process is; None where it holds all.
    """
    sizes = config.gpt(corpus.vocabulary_size)
    cut = parse_cut(config, schedule.num_stages)
    if cut == "time":
        cut = _agree_on_cut(config, sizes, schedule, corpus, exchange)
    with torch.device("meta"):
        model = GPT(sizes)
    if rank is None:  # all stages are here: what is tied stays one parameter
        materialize(model, config.seed, device)
        return split(model, schedule.num_stages, cut=cut)
    stages = split(model, schedule.num_stages, cut=cut)
    for stage in schedule.placement.stages_of[rank]:
        materialize(stages.modules[stage], config.seed, device)
    return stages


def with_known_cut(config: TrainConfig, stages: Stages) -> TrainConfig:
    """`config` with the blocks of every stage in place of a cut by measured times."""
    if config.parallel.cut != "time":
        return config
    cut = ",".join(map(str, _blocks(stages)))
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cut=cut))


def _blocks(stages: Stages) -> list[int]:
    """The number of blocks in each stage."""
    return [sum(name.startswith("blocks.") for name in layers) for layers in stages.layers]


def _agree_on_cut(
    config: TrainConfig, sizes: GPTConfig, schedule: Schedule, corpus: Corpus, exchange: Exchange
) -> list[int]:
    """Rank 0 measures the whole model on one micro-batch and tells the others how many blocks a stage gets."""
    counts: list[int] = []
    if exchange.rank == 0:
        with torch.device("meta"):
            model = GPT(sizes)
        materialize(model, config.seed)
        samples = range(min(config.samples_a_microbatch, corpus.num_windows(sizes.sequence_length)))
        pair = corpus.windows(samples, sizes.sequence_length)
        stages = split(model, schedule.num_stages, cut="time", sample=pair, loss_fn=loss_fn)
        counts = _blocks(stages)
    agreed: list[int] = json.loads(exchange.all_gather(json.dumps(counts).encode())[0])
    return agreed
