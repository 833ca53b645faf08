"""What one process holds of a training state, by kind, counted in storages."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from benchmarks.common.workloads import GPTWorkload
from benchmarks.data_parallel.workload import Part
from torch import Tensor, nn

import pipeloom as pl

KINDS = ("parameters", "masters", "gradients", "optimizer")


class Layout(NamedTuple):
    """What is to be held, and by how many."""

    pp: int
    dp: int
    strategy: str
    granularity: str | None = None
    schedule: str = "1f1b"
    precision: str = "bf16"
    gradients: str = "float32"


class Report(NamedTuple):
    """Of one process.

    Attributes:
        num_parameters: of its stages, in all copies together: the N of the formulas.
        held: bytes between the backwards and the update, by kind (`KINDS`), and "other": all else that is alive, but
            the batch.
        most: the most bytes of parameters, masters and gradients at once in a step.
        live_activations: the most held at once, and as many as the simulation says.
    """

    num_parameters: int
    held: dict[str, int]
    most: int
    live_activations: tuple[int, int]


class Holder:
    """The subject of a crew: trains two steps of a layout and says what this process then holds."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def measure(self, workload: GPTWorkload, layout: Layout) -> Report:
        """All tensors of layouts before are gone by now."""
        gc.collect()
        before = set(_storages(_all_tensors()))
        mesh = pl.Mesh(pp=layout.pp, dp=layout.dp)
        part = Part(whole=workload, index=mesh.coordinate("dp"), count=layout.dp)
        schedule = pl.schedules.build(layout.schedule, num_ranks=layout.pp, num_microbatches=part.num_microbatches)
        stages = schedule.placement.stages_of[mesh.coordinate("pp")]
        modules, num_parameters = _own_stages(part, schedule.num_stages, stages)
        pipe = pl.Pipeline(
            modules,
            schedule,
            loss_fn=part.loss,
            mesh=mesh,
            data=pl.DataParallel(layout.strategy, granularity=layout.granularity),
            precision=pl.Precision(layout.precision, gradients=layout.gradients),
        )
        del modules
        optimizer = torch.optim.AdamW(pipe.parameters())
        batch = part.batch()
        pipe.step(*batch)
        optimizer.step()
        optimizer.zero_grad()
        with _Peak(pipe) as peak:
            pipe.step(*batch)
        gc.collect()
        held = _by_kind(pipe, optimizer, before | set(_storages(batch)))
        timeline = pl.simulate(pipe.schedule, pl.Costs.uniform())
        rank = mesh.coordinate("pp")
        live = (pipe.peak_live_activations[rank], timeline.peak_activations[rank])
        pipe.close()
        return Report(num_parameters, held, peak.most, live)


def _own_stages(part: Part, num_stages: int, own: Iterable[int]) -> tuple[list[nn.Module], int]:
    """The stages of this rank, with nothing in place of the others, and the number of their parameters."""
    model = part.model()
    ends = list(accumulate(part.cut(num_stages), initial=0))
    modules = [model[ends[s] : ends[s + 1]] if s in set(own) else nn.Identity() for s in range(num_stages)]
    return list(modules), sum(p.numel() for module in modules for p in module.parameters())


def _by_kind(pipe: pl.Pipeline, optimizer: torch.optim.Optimizer, others: set[int]) -> dict[str, int]:
    seen = set(others)
    held = {}
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    module, main = _parameters(pipe), list(pipe.parameters())
    gradients = [p.grad for p in (*module, *main) if p.grad is not None]
    for kind, tensors in zip((*KINDS, "other"), (module, main, gradients, states, _all_tensors()), strict=True):
        new = {pointer: size for pointer, size in _storages(tensors).items() if pointer not in seen}
        seen |= new.keys()
        held[kind] = sum(new.values())
    return held


def _parameters(pipe: pl.Pipeline) -> list[nn.Parameter]:
    """Those that forwards compute with."""
    return [parameter for stage in pipe.modules() for parameter in stage.parameters()]


def _all_tensors() -> list[Tensor]:
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor)]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by address, of storages that are not empty."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


class _Peak:
    """Looks, at every layer's forward and every gradient, at the bytes of parameters, masters and gradients."""

    def __init__(self, pipe: pl.Pipeline) -> None:
        self._pipe = pipe
        self._handles: list[Any] = []
        self.most = 0

    def __enter__(self) -> _Peak:
        for stage in self._pipe.modules():
            for module in stage.modules():
                if not list(module.children()):
                    self._handles.append(module.register_forward_hook(self._look))
        for parameter in _parameters(self._pipe):
            hook: Callable[..., Any] = parameter.register_post_accumulate_grad_hook
            self._handles.append(hook(self._look))
        return self

    def _look(self, *_: Any) -> None:
        held = [*_parameters(self._pipe), *self._pipe.parameters()]
        gradients = [p.grad for p in held if p.grad is not None]
        self.most = max(self.most, sum(_storages([*held, *gradients]).values()))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
