"""`StageBuffers`: buffers that stages of several ranks have, of a module that the model calls at several depths.

Each rank has a copy. That is right for tables, and not for a buffer that forwards change, such as the statistics of a
BatchNorm, which then do not see all calls. The first training step shows which of them change.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.ir import Placement
from pipeloom.split import Stages
from pipeloom.split.planned.stage import PlannedStage


class _Held(NamedTuple):
    """A buffer before the first step: where it is, its value, and the stages that have it."""

    module: nn.Module
    attribute: str
    before: Tensor
    stages: tuple[int, ...]


class StageBuffers:
    """The buffers of this process that stages of other ranks have too.

    Args:
        cut_model: all stages.
        own: by stage, the modules of this process.
        placement: of the stages on ranks.
    """

    def __init__(self, cut_model: Stages, own: dict[int, nn.Module], placement: Placement) -> None:
        first_name: dict[int, str] = {}
        stages_of: dict[str, set[int]] = {}
        for stage, module in enumerate(cut_model.modules):
            for name, buffer in module.named_buffers(remove_duplicate=False):
                stages_of.setdefault(first_name.setdefault(id(buffer), name), set()).add(stage)
                stages_of.setdefault(name, set()).add(stage)
        names = {id(buffer): first_name[id(buffer)] for m in cut_model.modules for buffer in m.buffers()}
        self._held: dict[str, _Held] = {}
        for stage, module in own.items():
            original = dict(cut_model.modules[stage].named_buffers(remove_duplicate=False))
            repeated = module.container_buffers() if isinstance(module, PlannedStage) else set()
            for name, buffer in module.named_buffers(remove_duplicate=False):
                if id(buffer) in repeated:
                    continue
                key = names.get(id(original.get(name)), name)
                stages = tuple(sorted(stages_of.get(key, set()) | stages_of.get(name, set())))
                if len({placement.rank_of(each, 0) for each in stages}) > 1:
                    home, _, attribute = name.rpartition(".")
                    self._held[name] = _Held(module.get_submodule(home), attribute, buffer.detach().clone(), stages)

    def check(self) -> None:
        """Warn where the first step has changed one of them."""
        for name, held in self._held.items():
            now = held.module._buffers[held.attribute]
            if now is None or now.shape != held.before.shape or not torch.equal(now, held.before):
                stages = " and ".join(map(str, held.stages))
                warnings.warn(
                    f"forwards change the buffer {name!r}, which stages {stages} have on several ranks: its values are "
                    "not those of one process. Use a module for each call, cut the model so that one stage has all "
                    "calls, or keep the module in eval().",
                    stacklevel=4,
                )
                return
