"""Which samples each copy of the pipeline takes, and what processes are called."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from pipeloom.common.quantities import Bytes
from pipeloom.errors import InputError
from pipeloom.train.config.rules.unused import check_unused
from pipeloom.train.config.schedule import process_names, resolve_data_degree, samples_of_replica
from pipeloom.train.config.sections import BatchConfig, MemoryConfig, ParallelConfig
from pipeloom.train.config.train_config import TrainConfig


@pytest.mark.parametrize("count", [1, 5, 12, 13])
@pytest.mark.parametrize("copies", [1, 2, 3, 5])
def test_copies_take_each_sample_once(count: int, copies: int) -> None:
    pieces = [samples_of_replica(count, copy, copies) for copy in range(copies)]
    assert list(chain(*pieces)) == list(range(count))
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


def test_processes_have_names_of_their_places() -> None:
    two = TrainConfig(parallel=ParallelConfig(data=2))
    assert process_names(two) == [
        "rank 0 of replica 0",
        "rank 1 of replica 0",
        "rank 0 of replica 1",
        "rank 1 of replica 1",
    ]
    other = replace(two, parallel=replace(two.parallel, order="pp, dp"))
    assert process_names(other) == [
        "rank 0 of replica 0",
        "rank 0 of replica 1",
        "rank 1 of replica 0",
        "rank 1 of replica 1",
    ]
    assert process_names(TrainConfig()) == ["rank 0", "rank 1"]


def test_the_rest_of_the_processes_are_copies() -> None:
    config = TrainConfig(parallel=ParallelConfig(data=-1, pipeline=2), batch=BatchConfig(size=16))
    assert resolve_data_degree(config, 8).parallel.data == 4
    assert resolve_data_degree(config, 8).num_microbatches == 4
    with pytest.raises(InputError, match="Start 4"):
        resolve_data_degree(config, 3)


def test_what_was_for_more_copies_than_there_are_is_left_out() -> None:
    asked = ParallelConfig(
        data=-1, data_strategy="zero3", data_granularity="chunk", data_bucket_bytes=Bytes(4), order="pp,dp"
    )
    config = TrainConfig(parallel=asked)
    assert resolve_data_degree(config, 4).parallel == replace(asked, data=2)
    assert resolve_data_degree(config, 2).parallel == ParallelConfig(data=1)
    away = replace(config, memory=MemoryConfig(offload="cpu", offload_parameters=True))
    assert resolve_data_degree(away, 2).parallel == replace(asked, data=1, order="dp,pp")
    for each in (config, away):
        check_unused(resolve_data_degree(each, 2))
