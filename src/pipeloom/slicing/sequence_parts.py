"""`SequenceParts`: how the sequences of a batch are divided between context-parallel ranks, as the engine sees it."""

from abc import ABC, abstractmethod
from typing import Any

from pipeloom.slicing.tokens import Tokens

# What stages need to know of a micro-batch: its length, and masks of whole sequences. It travels with the activations.
Marks = dict[str, Any]


class SequenceParts(ABC):
    """Cuts batches along the sequence.

    Attributes:
        terms: settings that must be equal on all processes.
    """

    terms: tuple[str, ...] = ()

    @abstractmethod
    def cut_inputs(self, value: Any) -> tuple[Any, Marks]:
        """This rank's tokens of a micro-batch of inputs, and its marks.

        Raises:
            InputError: there are no sequences, or they cannot be cut.
        """

    @abstractmethod
    def cut_targets(self, value: Any) -> Any:
        """This rank's tokens of a micro-batch of targets. Raises InputError as `cut_inputs`."""

    @abstractmethod
    def tokens(self, marks: Marks) -> Tokens:
        """What stages run a micro-batch with these marks in."""

    @abstractmethod
    def join(self, value: Any) -> Any:
        """An output for whole sequences, from this rank's tokens; all ranks call it."""
