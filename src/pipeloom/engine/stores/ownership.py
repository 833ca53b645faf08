"""Which parameters and buffers a rank holds, and which other ranks hold them too.

Ranks in different processes have separate models. Ranks in one process behave the same way: each has its own copy of
modules and parameters that several ranks hold (tied parameters, replicas of a stage).
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from pipeloom.engine.stores.gradient_sum import Shared
from pipeloom.engine.stores.shared_buffers import BufferHome, SharedBuffers
from pipeloom.errors import InputError, unwrapped
from pipeloom.ir import Program
from pipeloom.split import Stages
from pipeloom.split.stage_module import is_of_stage


def own_stages(cut_model: Stages, program: Program, ranks: Iterable[int]) -> dict[int, dict[int, nn.Module]]:
    """For each of a process's ranks, the modules of its stages. The model itself is not changed.

    Modules are the model's own, with two exceptions. A module with a parameter of an earlier rank is a shallow copy
    that has a copy of this parameter and its hooks; hooks that are set on the module later are its copy's too. A module
    that an earlier rank runs is copied completely.

    Raises:
        InputError: a module has to be copied and `copy.deepcopy` fails.
    """
    taken_modules: set[int] = set()
    taken_parameters: set[int] = set()
    result: dict[int, dict[int, nn.Module]] = {}
    copied: dict[int, tuple[str, nn.Module, bool]] = {}
    for rank in ranks:
        modules = {stage: cut_model.modules[stage] for stage in program.placement.stages_of[rank]}
        copies: dict[int, nn.Parameter] = {}  # by the identity of the original
        for module in modules.values():
            for parameter in module.parameters():
                if id(parameter) in taken_parameters and id(parameter) not in copies:
                    copies[id(parameter)] = _copied(parameter)
        memo: dict[int, Any] = {}  # one per rank, so that copies of two of its stages share what the stages share
        result[rank] = {
            stage: _with_parameters(module, copies, memo, taken_modules, copied) for stage, module in modules.items()
        }
        for module in modules.values():
            taken_modules.update(map(id, module.modules()))
        for module in result[rank].values():
            taken_parameters.update(map(id, module.parameters()))
    cut_model.around.add_copied(copied.values())
    for rank, modules in result.items():
        _tie(modules, cut_model, rank)
    return result


def _tie(modules: dict[int, nn.Module], cut_model: Stages, rank: int) -> None:
    """Make a tied parameter of several stages of a rank one object again.

    Stages that got their values one by one, by `pipeloom.models.materialize` or ``to_empty``, have one each.

    Raises:
        InputError: they have different values.
    """
    found: dict[str, tuple[str, nn.Parameter]] = {}
    for stage in sorted(modules):
        for path, part in modules[stage].named_modules():
            for last, parameter in part._parameters.items():
                if parameter is None:
                    continue
                alias = f"{path}.{last}" if path else last
                known, first = found.setdefault(cut_model.canonical_names.get(alias, alias), (alias, parameter))
                if first is parameter:
                    continue
                if not first.is_meta and not parameter.is_meta and not _equal(first, parameter):
                    raise InputError(
                        f"{known!r} and {alias!r} are one parameter of the model and have different values on rank "
                        f"{rank}, whose stages have both. Give them the same values, or give values to the model "
                        "before it is split."
                    )
                part._parameters[last] = first


def _equal(one: nn.Parameter, other: nn.Parameter) -> bool:
    same_form = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return same_form and same_values(one, other)


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and type have the same values; NaN is the same as NaN."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    """A copy of a parameter, with the same hooks."""
    made = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, kind, None)
        if hooks:
            setattr(made, kind, OrderedDict(hooks))
    return made


def _with_parameters(
    module: nn.Module,
    copies: dict[int, nn.Parameter],
    memo: dict[int, Any],
    taken: AbstractSet[int],
    found: dict[int, tuple[str, nn.Module, bool]],
) -> nn.Module:
    """`module`, or a copy of it, with some parameters replaced and modules with an identity in `taken` copied.

    `memo` is `copy.deepcopy`'s; `found` gets the model's modules that are copied, with their names.
    """
    copied = [part for part in module.modules() if _is_copied(part, copies, taken)]
    if not copied:
        return module
    memo.update({id(parameter): parameter for parameter in module.parameters()})
    inside = set(map(id, copied))
    named = ((name, part) for name, part in module.named_modules() if id(part) in inside)
    found.update({id(part): (name, part, id(part) not in taken) for name, part in named if not is_of_stage(part)})
    memo.update({id(part): part for part in module.modules() if id(part) not in inside})
    for part in copied:
        if id(part) not in taken:
            memo.update({id(buffer): buffer for buffer in part.buffers(recurse=False)})
            # Hooks are not copied: what they record is for the user who registered them.
            hooks = (vars(part)[name] for name in vars(part) if "_hooks" in name)
            memo.update({id(each): each for each in hooks if isinstance(each, dict)})
    memo.update(copies)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise InputError(
            f"{type(module).__name__} shares parameters with a stage of another rank and cannot be copied "
            f"({unwrapped(str(error))}): each rank in a process needs its own copy. Run the ranks as processes, or "
            "make copy.deepcopy work on it."
        ) from error


def _is_copied(module: nn.Module, copies: dict[int, nn.Parameter], taken: AbstractSet[int]) -> bool:
    return any(id(part) in taken for part in module.modules()) or any(id(p) in copies for p in module.parameters())


class Ownership:
    """The parameters of a process's ranks.

    Attributes:
        held: for each rank of this process, its parameters by canonical name.
        homes: for each parameter that is held here, all stages that have it.
    """

    def __init__(self, by_rank: dict[int, dict[int, nn.Module]], cut_model: Stages, program: Program) -> None:
        self.held: dict[int, dict[str, nn.Parameter]] = {rank: {} for rank in by_rank}
        self.homes: dict[str, tuple[int, ...]] = {}
        self._program, self._buffers = program, _find_buffers(by_rank, cut_model, program)
        tied = {parameter.name: parameter.stages for parameter in cut_model.tied}
        for rank, stages in by_rank.items():
            for stage, module in stages.items():
                for alias, parameter in module.named_parameters():
                    name = cut_model.canonical_names.get(alias, alias)
                    self.held[rank][name] = parameter
                    self.homes[name] = tied.get(name, (stage,))

    def ranks_with(self, name: str) -> tuple[int, ...]:
        """All ranks that hold a parameter, ascending."""
        return self._program.ranks_of_group(self.homes[name])

    def shared(self, rank: int) -> dict[int, tuple[Shared, SharedBuffers]]:
        """By the stage of a REDUCE_GRAD on `rank`, the parameters that it sums and the buffers that it makes equal."""
        result: dict[int, tuple[Shared, SharedBuffers]] = {}
        stages = self._program.placement.stages_of[rank]
        for group in map(set, self._program.gradient_groups):
            lowest = min(group.intersection(stages), default=None)
            if lowest is not None:
                parameters = {
                    name: (parameter, self.ranks_with(name))
                    for name, parameter in self.held[rank].items()
                    if group.issuperset(self.homes[name]) and len(self.ranks_with(name)) > 1
                }
                buffers = {name: home for held, name, home in self._buffers[rank] if group.issuperset(held)}
                result[lowest] = parameters, SharedBuffers(rank, buffers)
        return result

    def replica_buffers(self, rank: int, stage: int) -> SharedBuffers:
        """The buffers that only the replicas of one stage hold."""
        return SharedBuffers(rank, {name: home for stages, name, home in self._buffers[rank] if stages == [stage]})


def _find_buffers(
    by_rank: dict[int, dict[int, nn.Module]], cut_model: Stages, program: Program
) -> dict[int, list[tuple[list[int], str, BufferHome]]]:
    """For each rank of this process, the buffers that other ranks hold too: their stages, names and homes."""
    canonical: dict[int, tuple[list[int], str]] = {}  # by a buffer's identity: its stages, its first name
    for stage, module in enumerate(cut_model.modules):
        for name, buffer in module.named_buffers():
            canonical.setdefault(id(buffer), ([], name))[0].append(stage)
    found: dict[int, list[tuple[list[int], str, BufferHome]]] = {rank: [] for rank in by_rank}
    for rank, held in by_rank.items():
        for stage, module in held.items():
            for alias, original in cut_model.modules[stage].named_buffers():
                stages, name = canonical[id(original)]
                ranks = program.ranks_of_group(tuple(stages))
                if len(ranks) > 1:
                    owner, _, attribute = alias.rpartition(".")
                    source = program.placement.rank_of(stages[0], 0)
                    home = BufferHome(module.get_submodule(owner), attribute, source, ranks)
                    found[rank].append((stages, name, home))
    return found
