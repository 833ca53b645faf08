"""Every schedule of the table trains a GPT with the sequential reference's gradients: one process, real processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipeloom as pl
from tests.cpu.every_schedule import PAIRWISE, Case, sizes, thinned, thinned_sizes, train_and_compare, whole_grid
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import accumulate, language_loss, make_gpt, tokens

REPLICATED = ("dualpipe", "chimera")


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_on_loopback(num_ranks: int) -> None:
    cases = thinned(num_ranks)  # of which some run in processes
    expected = set(pl.schedules.SYNCHRONOUS) - (set(REPLICATED) if num_ranks % 2 else set())
    assert {case.family for case in cases} == expected
    least = {(family, num_chunks): min(several) for family, num_chunks, several in thinned_sizes(num_ranks)}
    tried = {(case.family, case.num_chunks, case.num_microbatches) for case in cases}
    assert all((*which, m) in tried for which, m in least.items())
    in_processes = set(_of_processes(num_ranks))
    for case in cases:
        if case not in in_processes:
            train_and_compare(case, "loopback")


def test_the_thinned_grid_has_every_family_with_every_state_of_the_other_factors() -> None:
    cases = [case for num_ranks in (2, 3, 4) for case in thinned(num_ranks)]
    for family in pl.schedules.SYNCHRONOUS:
        of_family = [case for case in cases if case.family == family]
        for factor in ("uneven", "tied", "checkpointed"):
            assert {getattr(case, factor) for case in of_family} == {False, True}, (family, factor)
        assert len({case.num_microbatches for case in of_family}) > 1, family


def _of_processes(num_ranks: int) -> list[Case]:
    """Every family on two ranks, and on three or four, alternately with the fewest micro-batches and with more."""
    of_four = {(family, num_chunks): turn for turn, (family, num_chunks, _) in enumerate(sizes(4))}
    found = []
    for i, case in enumerate(thinned(num_ranks)):
        turn = of_four[case.family, case.num_chunks]
        here = num_ranks == 2 or case.family in REPLICATED or turn % 2 == num_ranks % 2
        if here and (num_ranks == 3 or i % 2 == (turn // 2 + num_ranks // 2) % 2):
            found.append(case)
    return found


def _run_cases(rank: int, cases: list[tuple[Case, str]]) -> None:
    for case, transport in cases:
        train_and_compare(case, transport)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_in_processes(num_ranks: int) -> None:
    """Every family with every number of chunks, on two ranks and on three or four: over shared memory and over gloo."""
    cases = _of_processes(num_ranks)
    run_ranks(_run_cases, num_ranks, [(case, ("shared-memory", "torch")[i % 2]) for i, case in enumerate(cases)])


@pytest.mark.whole_grid
@pytest.mark.parametrize("transport", ["loopback", "shared-memory", "torch"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("factors", PAIRWISE, ids=str)
def test_the_whole_grid(num_ranks: int, transport: str, factors: tuple[bool, ...]) -> None:
    cases = [(case, transport) for case in whole_grid(num_ranks) if case[4:] == factors]
    if transport == "loopback":
        _run_cases(0, cases)
    else:
        run_ranks(_run_cases, num_ranks, cases, timeout_seconds=450)


def _train_replicas(rank: int | None, name: str, transport: str) -> dict[str, list[torch.Tensor]]:
    """Five steps of AdamW; the copies of every parameter that this process holds, and losses as one process has."""
    reference = make_gpt(tied=True, dtype=torch.float64)
    schedule = pl.schedules.build(name, num_ranks=4, num_microbatches=8)
    expected_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    model = make_gpt(tied=True, dtype=torch.float64)
    with pl.Pipeline(model, schedule, loss_fn=language_loss, transport=transport) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            batch = tokens(9, seed=step)
            expected = accumulate(reference, language_loss, *batch, 8)
            torch.testing.assert_close(pipe.step(*batch), expected, rtol=1e-10, atol=0)
            norm = pl.clip_grad_norm(pipe, 1.0)
            expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            torch.testing.assert_close(norm, expected_norm, rtol=1e-10, atol=0)
            for o in (optimizer, expected_optimizer):
                o.step()
                o.zero_grad()
        output = pipe.forward(batch[0])
        if output is not None:  # of the whole batch, on every rank with the last stage
            torch.testing.assert_close(output, reference(batch[0]), rtol=1e-8, atol=1e-10)
        held: dict[str, list[torch.Tensor]] = {}
        for parameter_name, parameter in pipe.named_parameters():
            held.setdefault(parameter_name, []).append(parameter.detach().numpy())
        return held


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("dualpipe", "loopback"),
        ("dualpipe", "torch"),
        ("chimera", "loopback"),
        ("chimera", "shared-memory"),
        pytest.param("dualpipe", "shared-memory", marks=pytest.mark.whole_grid),
        pytest.param("chimera", "torch", marks=pytest.mark.whole_grid),
    ],
)
def test_copies_of_a_stage_stay_bitwise_equal_through_training(name: str, transport: str) -> None:
    answers = (
        [_train_replicas(None, name, transport)]
        if transport == "loopback"
        else run_ranks(_train_replicas, 4, name, transport)
    )
    names = set().union(*answers)
    for parameter in names:
        copies = [value for answer in answers for value in answer.get(parameter, [])]
        assert len(copies) == 2  # first and last stage stand on the same two ranks
        assert all((copy == copies[0]).all() for copy in copies), parameter


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=0.3)

    def forward(self, x):
        return self.norm(self.linear(x))


def _normed() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*[_Normed() for _ in range(2)])


def _buffers(rank: int | None, transport: str) -> list[dict[str, torch.Tensor]]:
    """What every copy of every BatchNorm holds after three steps, and after an evaluation, which changes nothing."""
    batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    schedule = pl.schedules.build("chimera", num_ranks=2, num_microbatches=4)
    with pl.Pipeline(_normed(), schedule, loss_fn=nn.functional.mse_loss, transport=transport) as pipe:
        for _ in range(3):
            pipe.step(batch, batch)
        pipe.evaluate(batch, batch)
        stages = [dict(stage.named_buffers()) for stage in pipe.modules()]
    return [{name: buffer.numpy() for name, buffer in stage.items()} for stage in stages]


@pytest.mark.parametrize("transport", ["loopback", "shared-memory", "torch"])
def test_buffers_of_all_copies_are_those_of_the_copy_that_ran_the_first_micro_batch(transport: str) -> None:
    reference = _normed()
    batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for piece in batch.tensor_split(4)[::2]:
            reference(piece)
    expected = {name: buffer.numpy() for name, buffer in reference.named_buffers()}
    answers = [_buffers(None, transport)] if transport == "loopback" else run_ranks(_buffers, 2, transport)
    copies = [(name, value) for stages in answers for stage in stages for name, value in stage.items()]
    assert len(copies) == 2 * len(expected)
    for name, value in copies:
        assert (value == expected[name]).all(), name


def _shared_norm(rank: int | None, transport: str) -> list[list[float]]:
    """What each rank holds of the statistics of a BatchNorm that runs in both stages."""
    torch.manual_seed(5)
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    batch = torch.randn(8, 4)
    schedule = pl.schedules.build("zb-h1", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, cut=[2, 2], transport=transport) as pipe:
        for _ in range(2):
            pipe.step(batch, batch)
        return [next(b for n, b in s.named_buffers() if n.endswith("running_mean")).tolist() for s in pipe.modules()]


@pytest.mark.parametrize("transport", ["loopback", "shared-memory"])
def test_buffers_of_a_module_in_two_stages_are_those_of_the_first(transport: str) -> None:
    torch.manual_seed(5)
    norm = nn.BatchNorm1d(4)
    first = nn.Sequential(nn.Linear(4, 4), norm)
    nn.Linear(4, 4)  # as many random numbers as there
    batch = torch.randn(8, 4)
    for _ in range(2):
        for piece in batch.tensor_split(2):
            first(piece)
    answers = [_shared_norm(None, transport)] if transport == "loopback" else run_ranks(_shared_norm, 2, transport)
    assert [mean for means in answers for mean in means] == [norm.running_mean.tolist()] * 2


def test_a_buffer_that_only_some_copies_change_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            if x.shape[0] == 2:  # of the batch below, micro-batch 1 alone
                self.seen += 1
            return self.linear(x)

    schedule = pl.schedules.build("chimera", num_ranks=2, num_microbatches=2)
    pipe = pl.Pipeline([Counts(), nn.Linear(4, 4)], schedule, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(5, 4)
    with pytest.raises(pl.errors.RunError, match=r"buffer seen was changed by forwards on rank 1 but not on rank 0"):
        pipe.step(batch, batch)
