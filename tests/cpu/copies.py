"""Train copies of a pipeline and compare with one process on all their samples: used by several tests."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.ir import DataStrategy
from tests.cpu.pairwise import pairwise
from tests.cpu.reference import checkpoint_blocks, language_loss, make_gpt, tokens

FAMILIES = ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "dualpipev")
CHUNKED = ("interleaved", "bfs", "zb-v", "dualpipev")
STRATEGIES = tuple(DataStrategy)
# Families that run as 1f1b or zb-v but for the order: with few strategies where the grid is not whole.
ALIKE = {
    "gpipe": ("ddp", "zero3"),
    "interleaved": ("zero1", "zero2"),
    "bfs": ("ddp", "parameter-server"),  # granularities have zero2 and zero3
    "zb-h1": ("zero1", "zero2"),
    "dualpipev": ("zero3",),
}
MICROBATCHES = 4
SIZES = (9, 7)  # samples of each copy: a mean of means would be another number
OPTIMIZERS = {
    # With an eps of 1e-8 one process that sums its gradients in another order is off by 8e-6 in float32.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, eps=1e-5),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}


class Case(NamedTuple):
    """One training run."""

    family: str
    strategy: str
    granularity: str | None = None
    tied: bool = False
    checkpointed: bool = False
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float64
    layout: str = "elements"
    bucket_bytes: int = 0  # a stage has about 10 kB

    @property
    def layers(self) -> int:
        """Blocks of the model: one per stage."""
        return 4 if self.family in CHUNKED else 2


def granularities() -> list[Case]:
    """Sharded gradients by chunk and by micro-batch."""
    factors = ("bfs", "1f1b", "zb-v"), ("zero2", "zero3"), ("chunk", "microbatch"), (False, True), (False, True)
    return [Case(*values) for values in product(*factors)]


def grid() -> list[Case]:
    """Every family with every strategy, in all states of the other factors; and the granularities."""
    strategies = [
        Case(family, strategy, None, *factors)
        for family, strategy, *factors in product(
            FAMILIES, STRATEGIES, (False, True), (False, True), OPTIMIZERS, TOLERANCES
        )
    ]
    return strategies + granularities()


def thinned() -> list[Case]:
    """Every family with every strategy once but for those of `ALIKE`, other factors in turn; pairs of granularities."""
    cases = []
    for (row, family), (column, strategy) in product(enumerate(FAMILIES), enumerate(STRATEGIES)):
        if strategy not in ALIKE.get(family, STRATEGIES):
            continue
        turn = 5 * row + column  # an odd step, so that a strategy's factors change from family to family
        tied, checkpointed = bool(turn & 1), bool(turn & 2)
        dtype = (torch.float64, torch.float32)[(turn >> 2) % 2]
        cases.append(Case(family, strategy, None, tied, checkpointed, ("adamw", "momentum")[(turn >> 1) % 2], dtype))
    cases += pairwise(granularities())
    cases += [Case("dualpipe", "ddp", tied=True), Case("dualpipe", "zero3", "microbatch", tied=True)]
    cases += [Case("seq1f1b", "zero2", "chunk"), Case("seq1f1b", "zero3", "microbatch")]
    cases += [Case("zb-v", "parameter-server", tied=True), Case("1f1b", "zero3", layout="parameters", tied=True)]
    return [case._replace(bucket_bytes=(0, 5000, 2**20)[i % 3]) for i, case in enumerate(cases)]


class Expected(NamedTuple):
    losses: list[Tensor]
    norms: list[Tensor]
    gradients: dict[str, Tensor]  # of the first two steps together, before clipping
    values: dict[str, Tensor]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Of all copies together."""
    return tokens(sum(SIZES), seed=step)


def expected(case: Case, num_steps: int) -> Expected:
    """What one process makes of the same batches: the first two before one update."""
    return _expected(case.layers, case.tied, case.optimizer, case.dtype, num_steps)


@cache
def _expected(layers: int, tied: bool, optimizer: str, dtype: torch.dtype, num_steps: int) -> Expected:
    model = make_gpt(tied=tied, layers=layers, dtype=dtype)
    updates = OPTIMIZERS[optimizer](model.parameters())
    losses, norms, gradients = [], [], {}
    for step in range(num_steps + 1):
        losses.append(_accumulate(model, *batch(step)))
        if step == 0:
            continue
        if step == 1:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        updates.step()
        updates.zero_grad()
    return Expected(losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()})


def _accumulate(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The micro-batches of one copy after the other; the mean over all samples."""
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    for x, y in zip(inputs.split(SIZES), targets.split(SIZES), strict=True):
        for piece, target in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
            loss = language_loss(model(piece), target) * (len(piece) / sum(SIZES))
            loss.backward()
            total += loss.detach()
    return total


def own_samples(copy: int, values: Tensor) -> Tensor:
    """One copy's part of a batch."""
    return values.split(SIZES)[copy]


def train_and_compare(case: Case, mesh: pl.Mesh, num_steps: int = 10) -> None:
    """Gradients of two steps, their norm, and `num_steps` updates."""
    wanted = expected(case, num_steps)
    tolerance = TOLERANCES[case.dtype]
    model = make_gpt(tied=case.tied, layers=case.layers, dtype=case.dtype)
    if mesh.coordinate("dp"):  # the first copy's values count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    if case.checkpointed:
        checkpoint_blocks(model)
    pieces = {"num_chunks": 2} if case.family in CHUNKED else {}
    pieces |= {"num_slices": 2} if case.family == "seq1f1b" else {}
    schedule = pl.schedules.build(case.family, num_ranks=2, num_microbatches=MICROBATCHES, **pieces)
    data = pl.DataParallel(case.strategy, case.granularity, case.layout, case.bucket_bytes)
    with pl.Pipeline(model, schedule, loss_fn=language_loss, mesh=mesh, data=data) as pipe:
        optimizer = OPTIMIZERS[case.optimizer](pipe.parameters())
        for step in range(num_steps + 1):
            samples = [own_samples(mesh.coordinate("dp"), values) for values in batch(step)]
            _close(pipe.step(*samples), wanted.losses[step], tolerance, f"{case}: loss {step}")
            if step == 0:
                pipe.evaluate(*samples)  # changes no gradient
                continue
            if step == 1:
                compare_gradients(pipe, wanted.gradients, tolerance, str(case))
            _close(pl.clip_grad_norm(pipe, 1.0), wanted.norms[step - 1], tolerance, f"{case}: norm {step}")
            optimizer.step()
            optimizer.zero_grad()
        values = {name.replace(".inner", ""): value for name, value in pipe.state_dict().items()}
        names = [name for name in values if name in wanted.values]
        assert names
        for name in names:
            _close(values[name], wanted.values[name], tolerance, f"{case}: {name}")
            if case.strategy == "ddp":
                check_equal_on_copies(values[name], mesh)


def compare_gradients(pipe: pl.Pipeline, wanted: dict[str, Tensor], tolerance: float, what: str) -> None:
    """Main gradients, of shards those of their elements."""
    for name, parameter in pipe.named_parameters():
        gradient = wanted[name.replace(".inner", "")]
        if name in pipe.state.ranges:
            start, stop, shape = pipe.state.ranges[name]
            assert shape == gradient.shape
            gradient = gradient.flatten()[start:stop]
        if parameter.numel():
            _close(parameter.grad, gradient, tolerance, f"{what}: gradient of {name}")


def check_equal_on_copies(value: Tensor, mesh: pl.Mesh) -> None:
    """Bit by bit."""
    others = [torch.empty_like(value) for _ in range(mesh.degree("dp"))]
    dist.all_gather(others, value.detach().contiguous(), group=mesh.group("dp"))
    assert all(torch.equal(other, value) for other in others)


def _close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    error = torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted).clamp_min(1e-30)
    assert error <= tolerance, f"{what} is off by {error:.2e} of its norm"
