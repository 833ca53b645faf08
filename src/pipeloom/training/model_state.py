"""`ModelState`: what a process holds of a model, and how a user reads and changes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeloom.engine.stores.ownership import Ownership, common_dtype, own_stages
from pipeloom.engine.stores.parameter_bytes import HeldBytes, Offloaded, PeakBytes
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.engine.stores.parameter_store import Sharing
from pipeloom.errors import InputError
from pipeloom.ir import Program
from pipeloom.split import Stages


class ModelState:
    """The stages that the ranks of this process hold, and their parameters.

    Args:
        cut_model: all stages.
        program: which says what rank holds which stage.
        ranks: those of this process.
        sharing: what copies of the pipeline share of the parameters.

    Attributes:
        stages: the modules held here by stage, of the lowest rank that holds it.
        parameter_names: canonical names of all parameters of the model, in its order.
        ownership: which main parameters (see `pipeloom.engine.stores.parameter_store`) and buffers the ranks of this
            process hold.
        stores: where parameters live, by rank.
        norm_dtype: the type in which norms of all parameters add up, the same on every rank.
    """

    def __init__(self, cut_model: Stages, program: Program, ranks: Iterable[int], sharing: Sharing) -> None:
        self._by_rank = own_stages(cut_model, program, ranks)
        self.norm_dtype = common_dtype(cut_model)
        found = Ownership.find(self._by_rank, cut_model, program)
        self.sharing = sharing
        self.stores = {
            rank: sharing.store(stages, found.held[rank], found.homes, cut_model.layers)
            for rank, stages in self._by_rank.items()
        }
        main = {rank: dict(store.parameters) for rank, store in self.stores.items()}
        self.ownership = replace(found, held=main)
        self.stages: dict[int, nn.Module] = {
            stage: module for stages in reversed(self._by_rank.values()) for stage, module in stages.items()
        }
        self.parameter_names = cut_model.parameter_names
        self._canonical_names = cut_model.canonical_names
        self._all_names = {
            name
            for module in cut_model.modules
            for named in (module.named_parameters, module.named_buffers)
            for name, _ in named(remove_duplicate=False)
        }

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Canonical name and main parameter of all that the ranks of this process hold, in the model's order.

        Main parameters are what an optimizer updates: the model's own, or, where copies of the pipeline share them or
        forwards have another format, shards or masters of them (`ranges`). One that several ranks of this process hold
        comes once for each of them.
        """
        for name in self.parameter_names:
            for held in self.ownership.held.values():
                if name in held:
                    yield name, held[name]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this process's optimizer has to update."""
        for _, parameter in self.named_parameters():
            yield parameter

    def owned_parameters(self, rank: int | None = None) -> Iterator[tuple[int, nn.Parameter]]:
        """Position in `parameter_names` and parameter, of those that no lower rank holds too.

        Over all processes these are the model's parameters, each once: for norms and checkpoints. With `rank`, those
        of one rank of this process.
        """
        for position, name in enumerate(self.parameter_names):
            for holder, held in self.ownership.held.items():
                if name in held and holder == self.ownership.ranks_with(name)[0] and rank in (None, holder):
                    yield position, held[name]

    def rank_parameters(self, rank: int) -> list[nn.Parameter]:
        """The parameters that one rank of this process holds, each once, in the model's order."""
        held = self.ownership.held[rank]
        return [held[name] for name in self.parameter_names if name in held]

    def modules(self) -> Iterator[nn.Module]:
        """The stage modules of all ranks of this process."""
        for stages in self._by_rank.values():
            yield from stages.values()

    def check_equal(self) -> None:
        """Raises InputError where a parameter is not the same on all ranks of this process that hold it."""
        self.ownership.check_equal(lambda rank, name: self.stores[rank].value(name))

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of all stages held here."""
        for module in self.modules():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the evaluation mode of all stages held here."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and persistent buffers held here, by their names in the uncut model.

        Of all processes of one copy it is the model's own ``state_dict()``. What several ranks of this process hold is
        that of the lowest. Parameters are not copied but where copies of the pipeline share them or masters exist: then
        they are gathered, in the format of the masters, and every process calls this. Buffers are those of this copy.
        """
        state: dict[str, Any] = {}
        for rank, stages in self._by_rank.items():
            whole = self.stores[rank].whole()
            for module in stages.values():
                for name, value in module.state_dict().items():
                    state.setdefault(name, whole.get(self._canonical_names.get(name, name), value))
        return state

    @property
    def ranges(self) -> dict[str, Range]:
        """By canonical name, which elements main parameters have that do not have their parameter's shape."""
        return {name: span for store in self.stores.values() for name, span in store.ranges.items()}

    @property
    def ties(self) -> dict[str, str]:
        """For every further name of a tied parameter, the canonical one."""
        return dict(self._canonical_names)

    def main_state(self) -> dict[str, Tensor]:
        """Main parameters and persistent buffers held here, by canonical name; not copied.

        Values may be written into the parameters; `refresh` puts them into the modules. Parameters that are in a file
        (`pipeloom.DataParallel.offload`) are read and written there, on the host, page by page.
        """
        state: dict[str, Tensor] = {}
        for name in self.parameter_names:
            store = next((store for store in self.stores.values() if name in store.parameters), None)  # the lowest rank
            if store is not None:
                state[name] = store.value(name)
        aliases = {alias for module in self.modules() for alias, _ in module.named_parameters(remove_duplicate=False)}
        for module in self.modules():
            for name, value in module.state_dict().items():
                if name not in aliases and isinstance(value, Tensor):
                    state.setdefault(self._canonical_names.get(name, name), value)
        return state

    @property
    def loss_scale(self) -> float:
        """By what losses are multiplied before their backward; main gradients are divided by it, for those of fp16.

        Where it was too large, gradients are not finite, and neither is their norm.

        Raises:
            InputError: on setting it: gradients are of 32 bits or more.
        """
        return next(iter(self.stores.values())).loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if scale != 1.0 and not (self.sharing.axis and self.sharing.axis.separate_master):
            raise InputError(f"loss_scale is {scale}: it is for gradients of 16 bits; pass precision='fp16'")
        for store in self.stores.values():
            store.loss_scale = scale

    def held_bytes(self) -> HeldBytes:
        """How many bytes parameters and gradients of this process take now, by kind."""
        held = [store.held_bytes() for store in self.stores.values()]
        return HeldBytes(*map(sum, zip(*held, strict=True)))

    @property
    def parameters_away(self) -> Offloaded:
        """Main parameters of this process that are in a store between updates, and what moved so far."""
        return Offloaded(*map(sum, zip(*(store.away for store in self.stores.values()), strict=True)))

    def record_peaks(self, wanted: bool = True) -> None:
        """Have runs look how many bytes gradients take (see `peak_bytes`), which takes them some time."""
        for store in self.stores.values():
            store.records_peaks = wanted

    def peak_bytes(self) -> PeakBytes:
        """The most bytes that gathered parameters and gradients took in the last run, summed over ranks."""
        peaks = [store.peak_bytes() for store in self.stores.values()]
        return PeakBytes(*map(sum, zip(*peaks, strict=True)))

    def refresh(self) -> None:
        """Give the modules' parameters, but those that are gathered in every run, the values of the main ones.

        Every process calls it. Runs do it by themselves.
        """
        for store in self.stores.values():
            store.refresh()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values into everything held here, in place, on all ranks of this process alike.

        Args:
            state: by names of the uncut model. It may hold what other processes hold, and a tied parameter under any
                of its names.

        Raises:
            InputError: a name is missing or not the model's, a shape is another, or the names of a tied parameter have
                different values; before anything is changed.
        """
        values = self._by_canonical_name(state)
        found = []
        for module in self.modules():
            own = module.state_dict()
            for name, mine in own.items():
                canonical = self._canonical_names.get(name, name)
                if canonical not in values:
                    raise InputError(f"the state has no {name!r}: this process holds it; pass the state of this model")
                value = values[canonical]
                if isinstance(mine, Tensor) and getattr(value, "shape", None) != mine.shape:
                    seen = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    raise InputError(
                        f"the state has {name!r} as {seen}: the model's has shape {tuple(mine.shape)}; pass the state "
                        "of this model"
                    )
            found.append((module, {name: values[self._canonical_names.get(name, name)] for name in own}))
        with ExitStack() as stack:
            for store in self.stores.values():
                stack.enter_context(store.writable())
            for module, loaded in found:
                module.load_state_dict(loaded)
        for store in self.stores.values():
            store.assign(values)

    def _by_canonical_name(self, state: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in state.items():
            if name not in self._all_names and not name.endswith("_extra_state"):
                raise InputError(f"the state has {name!r}: the model has nothing of that name; pass its own state")
            canonical = self._canonical_names.get(name, name)
            other = values.setdefault(canonical, value)
            if other is not value and isinstance(value, Tensor) and not torch.equal(other, value):
                raise InputError(
                    f"the state has {name!r} and {canonical!r} as different values: the model ties them; leave one out"
                )
        return values
