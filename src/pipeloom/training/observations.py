"""What stages declared in a step, summed over micro-batches and replicas and known on every rank.

every process    adds up what its forwards declared, by layer and name
                 the tables of all processes are added up, as vectors of one agreed order (`Entry`)
                 modules with ``after_step`` are called with the sums of what they observed
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.autograd.loss_metrics import combined
from pipeloom.engine.batch import Batch, Declared, ForwardKey
from pipeloom.engine.executor import Executor
from pipeloom.engine.model_state import ModelState
from pipeloom.errors import RunError
from pipeloom.processes.agreement import gather_json
from pipeloom.transport.call_numbers import num_samples_of

_LOST = "another rank ended before all ranks had added up what their stages observed; see its error"
_OF_LOSS = ""  # the layer of metrics beside the loss
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # names that torch.compile and checkpointing add, ignored


class Entry(NamedTuple):
    """One sum of a step.

    Attributes:
        layer: name of the module in the uncut model; the position of the stage where the stage's layers are unknown;
            "" for metrics beside the loss.
        name: of the loss, quantity or metric.
        shape: of the sum; None: an auxiliary loss, whose two numbers are the sums of value and of weight * value.
            Metrics have the numbers of `Metric.numbers`.
    """

    layer: str
    name: str
    shape: tuple[int, ...] | None

    @property
    def length(self) -> int:
        """Numbers in the vector."""
        return 2 if self.shape is None else math.prod(self.shape)


class AuxiliaryValue(NamedTuple):
    """An auxiliary loss of one step.

    Attributes:
        value: the mean over all samples (of slices: tokens); losses of one name in one layer are added up.
        weighted: its part of what was trained, the mean of weight * value.
    """

    value: float
    weighted: float


class Observed(NamedTuple):
    """The auxiliary losses and the quantities of one step, by layer and name, and the metrics beside the loss, by name.

    Quantities are float64.
    """

    losses: dict[str, dict[str, AuxiliaryValue]]
    quantities: dict[str, dict[str, Tensor]]
    metrics: dict[str, float]


class Observations:
    """What the stages of one process declared in its last step or evaluation.

    Args:
        state: the stages of this process.
        executor: runs them.
    """

    def __init__(self, state: ModelState, executor: Executor) -> None:
        self._state, self._executor = state, executor
        self._names: dict[nn.Module, str] = {}
        self._declared: dict[ForwardKey, Declared] = {}
        self._samples = 0
        self._own: dict[Entry, Tensor] | None = {}
        self._found: Observed | None = None
        self._agreed: list[Entry] | None = None  # of an earlier step
        self._has_listeners: bool | None = None

    def take(self, batch: Batch) -> None:
        """Take what the forwards of `batch` declared, which has run on all ranks of this process."""
        self._declared = batch.declared
        worker = self._executor.workers[self._executor.local_ranks[0]]
        self._samples = num_samples_of(worker.state.call)
        self._own = self._found = None

    def entries(self) -> list[Entry]:
        """The sums of all processes, in an order that is the same on all; every process calls it."""
        return self.agreed(self._table())

    def agreed(self, own: Iterable[Entry]) -> list[Entry]:
        """The sums of all processes, from those of this one; every process calls it.

        Raises:
            RunError: quantities of one name in one layer have different shapes.
        """
        gathered = gather_json([list(entry) for entry in own], self._executor.connection.members, lost=_LOST)
        found = {
            Entry(layer, name, None if shape is None else tuple(shape))
            for of_process in gathered
            for layer, name, shape in of_process
        }
        order = sorted(found, key=lambda entry: (_by_number(entry.layer), entry.name, entry.shape or ()))
        shapes: dict[tuple[str, str], Entry] = {}
        for entry in order:
            other = shapes.setdefault((entry.layer, entry.name), entry)
            if other is not entry and None not in (entry.shape, other.shape):
                if entry.layer == _OF_LOSS:
                    raise RunError(f"loss_fn returned {entry.name!r} as a sum and as a mean. Return one of them.")
                raise RunError(
                    f"layer {entry.layer!r} observes {entry.name!r} with shapes {list(other.shape or ())} and "
                    f"{list(entry.shape or ())}: quantities of one name are added up. Use one shape, or other names."
                )
        return order

    def vector(self, entries: Sequence[Entry]) -> Tensor:
        """This process's part of the sums, float64: [1 + sum of lengths]; the first number counts samples."""
        return vector_of(self._table(), entries, self._samples if self.counts_samples else 0)

    def gather(self) -> Observed:
        """The sums of the last step; the first call after a step is made by every process."""
        if self._found is None:
            entries = self.entries() if self._agreed is None else self._agreed
            summed = self._sum(entries)
            if summed[-1] > 0:  # a process has a sum that none had before
                entries = self.entries()
                summed = self._sum(entries)
            self._agreed, self._found = entries, observed_in(entries, summed[:-1])
        return self._found

    def _sum(self, entries: Sequence[Entry]) -> Tensor:
        """The sum of `vector` over processes, and behind it how many of them have sums that are not in `entries`."""
        others = torch.tensor([float(not self._table().keys() <= {*entries})], dtype=torch.float64)
        return self._executor.connection.sum_over_processes(torch.cat([self.vector(entries), others]))

    def call_listeners(self) -> None:
        """Call ``after_step`` of the modules that have it; every process calls this after every step."""
        if self._has_listeners is None:
            own = any(listens(module) for stage in self._state.modules() for module in stage.modules())
            count = self._executor.connection.sum_over_processes(torch.tensor([float(own)], dtype=torch.float64))
            self._has_listeners = bool(count > 0)
        if not self._has_listeners:
            return
        found = self.gather()
        for stage in self._state.modules():
            self.call_listeners_of(stage, found.quantities)

    def call_listeners_of(self, stage: nn.Module, quantities: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Call ``after_step`` of a stage's modules with the sums that each, or a module that it is in, observed."""
        for module in filter(listens, stage.modules()):
            parts = self._name_of(module, "").split(".")
            around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
            observed = {key: value for layer in around for key, value in quantities.get(layer, {}).items()}
            with torch.no_grad():
                module.after_step(observed)  # type: ignore[operator]

    @property
    def counts_samples(self) -> bool:
        """Whether this process, one per replica, counts the replica's samples."""
        rank, first = self._executor.connection.rank, self._executor.programs.train.placement.replicas[0][0]
        return self._state.sharing.blocks.leads and rank in (None, first)

    def _table(self) -> dict[Entry, Tensor]:
        """The sums of this process. Of processes that share a stage, which observe the same, the first alone counts."""
        if self._own is None:
            declared = self._declared if self._state.sharing.blocks.leads else {}
            self._own, self._declared = self.table(declared), {}
        return self._own

    def table(self, declared: Mapping[ForwardKey, Declared]) -> dict[Entry, Tensor]:
        """The sums of some forwards, float64 on the CPU."""
        sums: dict[Entry, Tensor] = {}
        for key in sorted(declared, key=lambda key: (key[0], key[1], key[2] or 0)):  # micro-batches in order
            samples, losses, observed, metrics = declared[key]
            for module, name, value, weight in losses:
                part = torch.tensor([samples, samples * weight], dtype=torch.float64) * float(value)
                _add(sums, Entry(self._name_of(module, str(key[0])), name, None), part)
            for module, name, values in observed:
                entry = Entry(self._name_of(module, str(key[0])), name, tuple(values.shape))
                _add(sums, entry, values.to("cpu", torch.float64, copy=True))
            for name, metric in metrics.items():
                part = torch.tensor(metric.numbers(), dtype=torch.float64)
                _add(sums, Entry(_OF_LOSS, name, tuple(part.shape)), part)
        return sums

    def _name_of(self, module: nn.Module | None, default: str) -> str:
        if module is None:
            return default
        if module not in self._names:
            for stage in self._state.modules():
                for name, part in stage.named_modules():
                    self._names.setdefault(part, ".".join(each for each in name.split(".") if each not in _WRAPPERS))
        return self._names.get(module) or default


def vector_of(own: Mapping[Entry, Tensor], entries: Sequence[Entry], samples: float) -> Tensor:
    """The sums of a process as a vector in the order of `entries`, behind a number of samples."""
    parts = [torch.tensor([float(samples)], dtype=torch.float64)]
    for entry in entries:
        part = own.get(entry)
        parts.append(torch.zeros(entry.length, dtype=torch.float64) if part is None else part.flatten())
    return torch.cat(parts)


def observed_in(entries: Sequence[Entry], summed: Tensor) -> Observed:
    """What the sum of `vector_of` over all processes says."""
    samples, *parts = torch.split(summed, [1, *(entry.length for entry in entries)])
    found = Observed({}, {}, {})
    for entry, part in zip(entries, parts, strict=True):
        if entry.shape is None:
            value, weighted = (part / samples).tolist()
            found.losses.setdefault(entry.layer, {})[entry.name] = AuxiliaryValue(value, weighted)
        elif entry.layer == _OF_LOSS:
            value = combined(part.tolist())
            if value is not None:
                found.metrics[entry.name] = value
        else:
            found.quantities.setdefault(entry.layer, {})[entry.name] = part.view(entry.shape).clone()
    return found


def listens(module: nn.Module) -> bool:
    """Whether a module itself, not one that it wraps, wants what it observed after every step."""
    return callable(vars(module).get("after_step") or getattr(type(module), "after_step", None))


def _add(sums: dict[Entry, Tensor], entry: Entry, part: Tensor) -> None:
    sums[entry] = part if entry not in sums else sums[entry].add_(part)


def _by_number(layer: str) -> list[tuple[int, str]]:
    """Orders "blocks.10" behind "blocks.9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in layer.split(".")]
