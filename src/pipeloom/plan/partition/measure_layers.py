"""Measure the profile of pipeloom's GPT on this machine; for other models use `Profile.of(*profile_model(...))`."""

from __future__ import annotations

import torch

from pipeloom.errors import InputError
from pipeloom.models.gpt import GPT, loss_fn
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.models.initial_values import init_parameters
from pipeloom.plan.partition.profile import Profile
from pipeloom.split import profile_model
from pipeloom.split.profile import threads_of_a_rank


def measure_gpt(config: GPTConfig, *, batch: int, num_ranks: int) -> Profile:
    """The profile of pipeloom's GPT on `batch` sequences, with the threads that one of `num_ranks` ranks gets here.

    Raises:
        InputError: `batch` is below 1.
    """
    if batch < 1:
        raise InputError(f"batch={batch}: a minibatch needs at least 1 sequence. Raise it.")
    with threads_of_a_rank(num_ranks), torch.random.fork_rng(devices=[]):
        model = GPT(config)
        init_parameters(model, seed=0)
        tokens = torch.randint(config.vocabulary_size, (2, batch, config.sequence_length))
        return Profile.of(*profile_model(model, (tokens[0], tokens[1]), loss_fn=loss_fn))
