"""`ModelState`: the stages and parameters of one process, read and written."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.engine.stores.ownership import Ownership, own_stages, same_values
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.engine.stores.sharing import RankModules, Sharing
from pipeloom.errors import InputError
from pipeloom.ir import Program
from pipeloom.slicing.sliceable import keeps_slices
from pipeloom.split import Stages
from pipeloom.split.stage_module import StageModule


class ModelState:
    """The stages that the ranks of this process hold, and their parameters.

    *Main parameters* are the parameters that an optimizer updates. They are the model's own, except where data-parallel
    replicas shard them or forwards use a 16-bit format: then they are shards, or float32 masters.

    Args:
        cut_model: all stages of the model.
        program: decides which rank holds which stage.
        ranks: those of this process.
        sharing: what data-parallel replicas share.

    Attributes:
        stages_of: by rank of this process, its modules by stage.
        stages: modules by stage. Where several ranks of this process hold a stage, the module of the lowest.
        parameter_names: canonical names of all parameters of the model, in its order.
        ownership: which main parameters and buffers each rank of this process holds.
        stores: by rank, the store of its parameters.
        sharing: as given.
        norm_dtype: the dtype in which norms of all parameters are summed, the same on every rank.
        ties: the canonical name for every other name of a tied parameter.
        keeps_slices: whether all stages of the model support slices of a sequence.
        sequence_length: the most tokens of a sequence, where the model's modules have such an attribute; else None.
        has_copies: whether several ranks of this process hold the same parameter.
        whole: the uncut model without values, where it is one of transformers.
        around: the modules around the model's layers.
    """

    def __init__(self, cut_model: Stages, program: Program, ranks: Iterable[int], sharing: Sharing) -> None:
        self.stages_of = own_stages(cut_model, program, ranks)
        self.stages: dict[int, nn.Module] = {
            stage: module for stages in reversed(self.stages_of.values()) for stage, module in stages.items()
        }
        dtypes = [parameter.dtype for module in cut_model.modules for parameter in module.parameters()]
        self.norm_dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()
        self.sharing, self.ownership = sharing, Ownership(self.stages_of, cut_model, program)
        self.stores = {
            rank: sharing.store(RankModules(stages, self.ownership.held[rank], self.ownership.homes, cut_model.layers))
            for rank, stages in self.stages_of.items()
        }
        main = self.ownership.held = {rank: dict(store.parameters) for rank, store in self.stores.items()}
        self.parameter_names = cut_model.parameter_names
        parts = (part for module in cut_model.modules for part in module.modules())
        lengths = [length for part in parts if isinstance(length := getattr(part, "sequence_length", None), int)]
        self.sequence_length = min(lengths, default=None)
        self.keeps_slices = all(isinstance(each, StageModule) and keeps_slices(each) for each in cut_model.modules)
        self.ties: dict[str, str] = dict(cut_model.canonical_names)
        self.has_copies = sum(map(len, main.values())) > len({name for held in main.values() for name in held})
        self.whole, self.around = cut_model.whole, cut_model.around
        self._all_names = {
            name
            for module in cut_model.modules
            for named in (module.named_parameters, module.named_buffers)
            for name, _ in named(remove_duplicate=False)
        }

    def modules(self) -> Iterator[nn.Module]:
        """The stage modules of all ranks of this process."""
        for stages in self.stages_of.values():
            yield from stages.values()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Canonical names and main parameters of all ranks of this process, in the model's order.

        A parameter that several ranks of this process hold comes once per rank.
        """
        for name in self.parameter_names:
            for held in self.ownership.held.values():
                if name in held:
                    yield name, held[name]

    def owned_parameters(self, rank: int | None = None) -> Iterator[tuple[int, nn.Parameter]]:
        """Position in `parameter_names` and parameter, for parameters that no lower rank holds.

        Over all processes they are the model's parameters, each once: for norms and checkpoints. With `rank`, only
        those of one rank of this process.
        """
        for position, name in enumerate(self.parameter_names):
            for holder, held in self.ownership.held.items():
                if name in held and holder == self.ownership.ranks_with(name)[0] and rank in (None, holder):
                    yield position, held[name]

    def rank_parameters(self, rank: int) -> list[nn.Parameter]:
        """The main parameters of one rank of this process, each once, in the model's order."""
        held = self.ownership.held[rank]
        return [held[name] for name in self.parameter_names if name in held]

    @property
    def ranges(self) -> dict[str, Range]:
        """By canonical name, the elements that each sharded main parameter holds; full parameters are left out."""
        return {name: span for store in self.stores.values() for name, span in store.ranges.items()}

    def check_around(self) -> None:
        """Raises SplitError where stages would not run what the model's forward does now (see `AroundLayers`)."""
        self.around.check(training=any(module.training for module in self.modules()))

    def check_values(self) -> None:
        """Raises InputError where a parameter or buffer held here is on the meta device, where nothing has a value."""
        for stage, module in sorted(self.stages.items()):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor.is_meta:
                    raise InputError(
                        f"{name!r} of stage {stage} is on the meta device: it has a shape and no values. Before the "
                        "Pipeline is made, give the model or its stages values, with to_empty(device=...) and "
                        "load_state_dict(), with pipeloom.models.materialize, or load it with pipeloom.from_pretrained."
                    )

    def check_equal(self) -> None:
        """Raises InputError where ranks of this process hold different values of one parameter."""
        held = self.ownership.held
        lowest = {name: rank for rank in reversed(held) for name in held[rank]}
        for rank, parameters in held.items():
            for name, parameter in parameters.items():
                if held[lowest[name]][name] is parameter:
                    continue
                one, other = (self.stores[holder].value(name) for holder in (lowest[name], rank))
                if one.shape != other.shape or one.dtype != other.dtype:
                    kinds = [f"a {each.dtype} of shape {tuple(each.shape)}" for each in (one, other)]
                    raise InputError(
                        f"parameter {name!r} is {kinds[0]} on rank {lowest[name]}, {kinds[1]} on rank {rank}: a model "
                        "must keep its types and shapes. Change it before the Pipeline is made, and make another one."
                    )
                if not same_values(one, other):
                    raise InputError(
                        f"parameter {name!r} differs on ranks {lowest[name]} and {rank}: all ranks that hold a "
                        "parameter must update their copies alike. Make the optimizer from the Pipeline's "
                        "parameters(), zero gradients with it, and load values with the Pipeline's load_state_dict()."
                    )

    def main_state(self) -> dict[str, Tensor]:
        """Main parameters and persistent buffers held here, by canonical name; not copied.

        Values may be written into the parameters; `refresh` puts them into the modules. Parameters in a file
        (`pipeloom.DataParallel.offload`) are read and written there, page by page, on the host.
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
                    state.setdefault(self.ties.get(name, name), value)
        return state

    def refresh(self) -> None:
        """Copy main parameters into the modules' parameters. Every process calls it; every run does so by itself.

        Parameters that each run gathers again (zero3) are left out.
        """
        for store in self.stores.values():
            store.refresh()

    def full_forms(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of `full_tensors`, by name; nothing is gathered."""
        blocks, forms = self.sharing.blocks, dict[str, tuple[tuple[int, ...], torch.dtype]]()
        for rank, stages in self.stages_of.items():
            main = self.ownership.held[rank]
            for alias, value in (item for module in stages.values() for item in module.state_dict().items()):
                name = self.ties.get(alias, alias)
                if name in main:
                    forms.setdefault(name, (tuple(blocks.full_shape(main[name], tuple(value.shape))), main[name].dtype))
                elif isinstance(value, Tensor):
                    forms.setdefault(name, (tuple(value.shape), value.dtype))
        return forms

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters and persistent buffers held here, by canonical name, each once.

        Where main parameters are shards, blocks or masters, each is gathered when its turn comes, into a copy in the
        masters' dtype, and every process iterates to the end. Other values are not copied.
        """
        blocks, seen = self.sharing.blocks, set[str]()
        for rank, stages in self.stages_of.items():
            main = self.ownership.held[rank]
            own: dict[str, Tensor] = {}
            for module in stages.values():
                for alias, value in module.state_dict().items():
                    if isinstance(value, Tensor):
                        own.setdefault(self.ties.get(alias, alias), value)
            for unit in self.stores[rank].units():
                for name, value in unit.items():
                    own.pop(name, None)
                    full = blocks.join(main[name], value)
                    if name not in seen:
                        seen.add(name)
                        yield name, full
            for name, value in own.items():
                full = blocks.join(main[name], value) if name in main else value
                if name not in seen:
                    seen.add(name)
                    yield name, full

    def state_dict(self) -> dict[str, Any]:
        """Full parameters and persistent buffers held here, by their names in the uncut model.

        Every process calls this where values are gathered; see `full_tensors`.
        """
        full = dict(self.full_tensors())
        state: dict[str, Any] = {}
        for module in self.modules():
            for name, value in module.state_dict().items():
                state.setdefault(name, full.get(self.ties.get(name, name), value))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values into everything held here, in place, on all ranks of this process.

        Args:
            state: values by the names of the uncut model. It may hold values of other processes, and a tied parameter
                under any of its names.

        Raises:
            InputError: a name is missing or unknown, a shape differs, or the names of a tied parameter have different
                values. Nothing is changed then.
        """
        values = self._by_canonical_name(state)
        main = {name: parameter for held in self.ownership.held.values() for name, parameter in held.items()}
        blocks = self.sharing.blocks
        found, cut = [], dict(values)
        for module in self.modules():
            loaded = {}
            for name, mine in module.state_dict().items():
                canonical = self.ties.get(name, name)
                if canonical not in values:
                    raise InputError(
                        f"the state dict has no {name!r}, which a stage of this process needs. Pass the state dict of "
                        "the whole model, with the names of model.state_dict()."
                    )
                value = loaded[name] = values[canonical]
                shape, parameter = getattr(value, "shape", None), main.get(canonical)
                if isinstance(mine, Tensor):
                    wanted = tuple(mine.shape)
                    wanted = wanted if parameter is None else blocks.full_shape(parameter, wanted)
                    if shape != wanted:
                        seen = f"type {type(value).__name__}" if shape is None else f"shape {tuple(shape)}"
                        raise InputError(
                            f"{name!r} has {seen} in the state: the model's has shape {wanted}. Pass this model's "
                            "state."
                        )
                if parameter is not None:
                    loaded[name] = cut[canonical] = blocks.cut(parameter, value)
            found.append((module, loaded))
        with ExitStack() as stack:
            for store in self.stores.values():
                stack.enter_context(store.writable())
            for module, loaded in found:
                module.load_state_dict(loaded)
        for store in self.stores.values():
            store.assign(cut)

    def _by_canonical_name(self, state: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in state.items():
            if name not in self._all_names and not name.endswith("_extra_state"):
                raise InputError(f"the state has {name!r}: the model does not have it. Pass this model's state.")
            canonical = self.ties.get(name, name)
            other = values.setdefault(canonical, value)
            if other is not value and isinstance(value, Tensor) and not torch.equal(other, value):
                raise InputError(
                    f"the state has different values for {name!r} and {canonical!r}, which the model ties. Leave one "
                    "out."
                )
        return values
