"""Stages whose blocks torch.compile compiles."""

from collections.abc import Iterable

from torch import nn

from pipeloom.split.stage_module import StageModule, composite_blocks


def compile_stages(modules: Iterable[nn.Module]) -> None:
    """Compile every block of the stages, or a stage without blocks as a whole; names of parameters stay.

    Blocks of one kind share their code: it is made once, when the first of them runs.
    """
    for module in modules:
        blocks = composite_blocks(module) if isinstance(module, StageModule) else []
        for block in blocks or [module]:
            block.compile()
