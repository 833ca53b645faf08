"""What batches must be like for processes that share the samples or the tokens of a micro-batch between layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeloom.engine.batch import Batch
from pipeloom.parallel.tensor.grids.layers import GridLookUp
from pipeloom.parallel.tensor.grids.shape import GridShape
from pipeloom.parallel.tensor.one_d.tokens import check_tokens
from pipeloom.parallel.tensor.one_d.vocabulary import LookUp
from pipeloom.transport.values import flatten


class BatchRule:
    """Checks batches before anything runs: a function that raises InputError.

    Embeddings share samples (2d, 2.5d, 3d) or tokens (sequence parallelism) out; they know into how many parts. A first
    stage with `check_inputs`, such as one of a traced model, knows what it takes.

    Args:
        modules: the stages of the model.
        context: context-parallel degree.
    """

    def __init__(self, modules: Sequence[nn.Module], context: int) -> None:
        self._checks: list[Any] = [module.check_inputs for module in modules if hasattr(module, "check_inputs")]
        found = [getattr(part, "look_up", None) for module in modules for part in module.modules()]
        self._grid: GridShape | None = next((each.grid.shape for each in found if isinstance(each, GridLookUp)), None)
        shared = (each.vocabulary.axis.degree for each in found if isinstance(each, LookUp) and each.sequence)
        self._sequence, self._context = next(shared, 1), context

    @property
    def takes_all(self) -> bool:
        """Whether batches of any size and length are valid."""
        return self._grid is None and self._sequence == 1

    def __call__(self, batch: Batch) -> None:
        """Check the micro-batches that this process reads, before their sequences are cut for context parallelism."""
        for check in self._checks:
            for value in batch.inputs:
                check(value)
        if self._grid is not None:
            for value in (*batch.inputs, *(batch.targets or ())):
                tensor = next((tensor for tensor in flatten(value)[1] if tensor.dim()), None)
                if tensor is not None:
                    self._grid.check_divides(len(tensor), self._grid.batch_blocks, "micro-batch size")
        if self._sequence > 1:
            lengths = {extent.end - extent.start for extent in batch.extents} or set(map(_length, batch.inputs))
            for length in sorted(lengths):
                check_tokens(length, self._sequence, context=self._context)


def _length(value: Any) -> int:
    """Tokens of a micro-batch of inputs; 0 where it has no sequences."""
    if isinstance(value, Mapping) and isinstance(value.get("input_ids"), Tensor):
        value = value["input_ids"]
    return next((tensor.shape[1] for tensor in flatten(value)[1] if tensor.dim() > 1), 0)
