"""`StageInputs`: what a stage is given stays as it is, although the stage may work in place.

Autograd forbids it on leaves that require a gradient; elsewhere it would change the caller's batch, or values that
another stage of this process saved. The first micro-batch of a stage gets copies. They show whether it works in place:
if so, it gets copies in all later runs too.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeloom.autograd.auxiliary_losses import Collected
from pipeloom.engine.elsewhere import find_elsewhere
from pipeloom.engine.rank_state import RankWiring
from pipeloom.errors import RunError
from pipeloom.transport.values import Value, copied, flatten, tensors_in, unflatten


class StageInputs:
    """The inputs of one forward of a stage.

    Args:
        wiring: of the rank.
        stage: the stage.
        training: whether the forward is one of a step.
    """

    def __init__(self, wiring: RankWiring, stage: int, *, training: bool) -> None:
        self._copies, self._stage = wiring.copies_input, stage
        self._elsewhere = wiring.elsewhere if training else {}
        self._module = wiring.stages[stage]
        self._known, self._key = wiring.runs_known, (stage, training)
        self._given: list[tuple[Tensor, int]] = []  # tensors and their versions
        self._overlapping: Sequence[int] = ()
        self.overlapping: list[Tensor] = []  # the tensors of the last run that must not be changed

    def take(self, value: Value, overlapping: Sequence[int] = ()) -> Value:
        """The value for a run that begins; `overlapping` tensors of it must not be changed (`Layout.overlapping`)."""
        tensors = tensors_in(value)
        if self._key not in self._known or self._copies[self._stage]:  # what later stages train is copied on arrival
            tensors = [t if t.requires_grad and self._stage else t.clone() for t in tensors]
            value = unflatten(flatten(value)[0], tensors)
        elif torch.is_grad_enabled() and any(t.is_inference() for t in tensors):  # no graph can hold them
            tensors = [t.clone() for t in tensors]
            value = unflatten(flatten(value)[0], tensors)
        self._overlapping = overlapping
        self._note(tensors)
        return value

    def _note(self, tensors: list[Tensor]) -> None:
        self._given = [(tensor, -1 if tensor.is_inference() else tensor._version) for tensor in tensors]

    def _changed(self) -> list[int]:
        """Positions of the tensors that the stage changed in place."""
        pairs = enumerate(self._given)
        return [index for index, (tensor, version) in pairs if version != -1 and tensor._version != version]

    def run(self, module: Callable[[Value], Value], value: Value, leaves: list[Tensor]) -> tuple[Value, Collected]:
        """The output of `module` for what `take` returned, and what it declared."""
        collected = Collected(within=self._module)
        try:
            with collected:
                output = module(value)
        except RuntimeError as error:
            if not leaves or "a leaf Variable that requires grad" not in str(error):
                raise
            self._copies[self._stage] = True
            collected = Collected(within=self._module)
            value = copied(value)
            self._note(tensors_in(value))
            with collected:
                output = module(value)
        if self._overlapping and not set(self._overlapping).isdisjoint(self._changed()):
            raise RunError(
                f"stage {self._stage} changes an input in place that has memory in common with another value between "
                "stages, such as a view of it or a skip, which would stay as it was. Copy the input before "
                "(x = x.clone()), or cut elsewhere."
            )
        if not self._copies[self._stage] and self._changed():
            self._copies[self._stage] = True
            if self._key in self._known and self._stage == 0:
                warnings.warn(
                    "the first stage has changed its inputs in place, unlike in its first step: this batch is changed. "
                    "From now on the stage gets copies.",
                    stacklevel=2,
                )
        if self._key not in self._known:
            name = find_elsewhere(tensors_in(output), self._elsewhere)
            if name is not None:
                raise RunError(
                    f"stage {self._stage} reads the parameter {name!r} of another rank, which no layer of its own has "
                    "as a parameter: its gradient would be lost. Assign it in the layer that reads it "
                    "(self.shared = ...)."
                )
        self._known.add(self._key)
        self.overlapping = [self._given[index][0] for index in self._overlapping]
        self._given = []
        return output, collected
