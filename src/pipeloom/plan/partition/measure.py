"""Measure the profile of a model on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipeloom.errors import InputError
from pipeloom.models.gpt import GPT, GPTConfig, loss_fn
from pipeloom.models.init import init_parameters
from pipeloom.plan.partition.profile import Profile
from pipeloom.split import profile_model
from pipeloom.split.profile import LossFn, threads_of_a_rank


def measure_profile(
    model: nn.Module | Sequence[nn.Module],
    sample: Any,
    *,
    layers: Sequence[str] | None = None,
    loss_fn: LossFn | None = None,
    num_warmups: int = 2,
    num_rounds: int = 5,
) -> Profile:
    """The profile of any model that `pipeloom.split` can cut, on one minibatch; the model stays as it is.

    Args:
        model, layers: as for `pipeloom.split`.
        sample: the input of one minibatch; with `loss_fn`, the pair (inputs, targets).
        loss_fn: its time is added to the last layer's.
        num_warmups: rounds of each layer that are not counted.
        num_rounds: rounds of which the median is taken.

    Raises:
        SplitError: the model cannot be cut into layers, or has no values.
    """
    return Profile.of(
        profile_model(model, sample, layers=layers, loss_fn=loss_fn, num_warmups=num_warmups, num_rounds=num_rounds)
    )


def measure_gpt(config: GPTConfig, *, batch: int, num_ranks: int) -> Profile:
    """The profile of pipeloom's GPT on `batch` sequences, with as many threads as each of `num_ranks` ranks here gets.

    Raises:
        InputError: no sequences.
    """
    if batch < 1:
        raise InputError(f"batch {batch}: a minibatch has one sequence at least; raise it")
    with threads_of_a_rank(num_ranks), torch.random.fork_rng(devices=[]):
        model = GPT(config)
        init_parameters(model, seed=0)
        tokens = torch.randint(config.vocabulary_size, (2, batch, config.sequence_length))
        return measure_profile(model, (tokens[0], tokens[1]), loss_fn=loss_fn)
