"""What one process holds of a training state, by kind, counted in storages."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from benchmarks.common.workloads import GPTWorkload
from benchmarks.data_parallel.workload import Part
from torch import Tensor, nn

import pipeloom as pl

KINDS = ("parameters", "masters", "gradients", "optimizer")
BUCKET_BYTES = 1 << 20  # a fraction of a rank's few million parameters, as the default is of those of real ones


class Layout(NamedTuple):
    """What is to be held, and by how many copies of how many ranks."""

    pp: int
    dp: int
    strategy: str
    granularity: str | None = None
    schedule: str = "1f1b"
    precision: str = "bf16"
    gradients: str = "same"


class Report(NamedTuple):
    """Of one process.

    Attributes:
        num_parameters: of its stages, in all copies together: the N of the formulas.
        held: bytes between the backwards and the update, by kind (`KINDS`), and "other": all else that is alive, but
            the batch.
        most: the most bytes that were alive at once in a step: looked at behind every layer's forward and at
            every gradient. What autograd keeps is not among them.
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
        gc.collect()
        gc.freeze()  # what is there now is not looked at
        mesh = pl.Mesh(pp=layout.pp, dp=layout.dp)
        rank = mesh.coordinate("pp")
        part = Part(whole=workload, index=mesh.coordinate("dp"), count=layout.dp)
        schedule = pl.schedules.build(layout.schedule, num_ranks=layout.pp, num_microbatches=part.num_microbatches)
        model, num_parameters = _own_part(part, schedule.num_stages, schedule.placement.stages_of[rank])
        pipe = pl.Pipeline(
            model,
            schedule,
            loss_fn=part.loss,
            cut=part.cut(schedule.num_stages),
            mesh=mesh,
            data=pl.DataParallel(layout.strategy, granularity=layout.granularity, bucket_bytes=BUCKET_BYTES),
            precision=pl.Precision(layout.precision, gradients=layout.gradients),
        )
        optimizer = torch.optim.AdamW(pipe.parameters())
        batch = part.batch()
        pipe.step(*batch)
        pl.update_parameters(optimizer)
        optimizer.zero_grad()
        with _Peak(pipe, batch) as peak:
            pipe.step(*batch)
        gc.collect()
        held = _by_kind(pipe, optimizer, batch)
        live = round(pl.simulate(pipe.schedule, pl.Costs.uniform()).peak_activations[rank] / pipe.schedule.stage_share)
        report = Report(num_parameters, held, peak.most, (pipe.memory.peak_live_activations[rank], live))
        pipe.close()
        gc.unfreeze()
        return report


def _own_part(part: Part, num_stages: int, own: Iterable[int]) -> tuple[nn.Sequential, int]:
    """The model with the stages of other ranks as mere shapes, and the number of the others' parameters."""
    model = part.model()
    ends = list(accumulate(part.cut(num_stages), initial=0))
    for stage in set(range(num_stages)) - set(own):
        model[ends[stage] : ends[stage + 1]].to("meta")
    return model, sum(p.numel() for p in model.parameters() if not p.is_meta)


def _by_kind(pipe: pl.Pipeline, optimizer: torch.optim.Optimizer, batch: Sequence[Tensor]) -> dict[str, int]:
    seen = set(_storages(batch))
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
    found = (tensor.untyped_storage() for tensor in tensors if not tensor.is_meta)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


class _Peak:
    """Looks now and then at the bytes of all tensors that are alive."""

    def __init__(self, pipe: pl.Pipeline, batch: Sequence[Tensor]) -> None:
        self._pipe = pipe
        self._batch_bytes = sum(_storages(batch).values())
        self._handles: list[Any] = []
        self.most = 0

    def __enter__(self) -> _Peak:
        for stage in self._pipe.modules():
            for module in stage.modules():
                if module._parameters:
                    self._handles.append(module.register_forward_hook(self._look))
            for parameter in stage.parameters():
                hook: Callable[..., Any] = parameter.register_post_accumulate_grad_hook
                self._handles.append(hook(self._look))
        return self

    def _look(self, *_: Any) -> None:
        gradients = [p.grad for p in _parameters(self._pipe) if p.grad is not None]  # autograd's own, else unseen
        self.most = max(self.most, sum(_storages([*gradients, *_all_tensors()]).values()) - self._batch_bytes)

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
