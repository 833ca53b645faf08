"""`ExpertSizes`: the sizes of a layer of experts, which formulae of bytes, memory and time need. No torch here."""

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """The experts of one block, all processes together.

    Attributes:
        experts: number of experts, without shared ones.
        top_k: experts per token; of expert-choice routers the mean, which need not be whole.
        expert_width: of each expert's inner layer.
        gated: whether an expert has two matrices of width x expert_width.
        shared: experts that every token passes.
        capacity_factor: capacity over the mean number of assignments per expert; None: no limit.
        by_sequence: whether the tokens of each sequence have a capacity of their own, not all of a micro-batch.
        router: its name, see `pipeloom.models.experts.routers`.
        z_loss: whether the router has a z-loss.
    """

    experts: int
    top_k: float
    expert_width: int
    gated: bool = False
    shared: int = 0
    capacity_factor: float | None = None
    by_sequence: bool = False
    router: str = "topk"
    z_loss: bool = False

    def capacity(self, samples: int, tokens: int) -> int:
        """Most assignments of one process's micro-batch of `samples`, with `tokens` in all, to one expert."""
        if self.capacity_factor is None:
            return tokens
        groups = samples if self.by_sequence else 1
        group = tokens // groups
        most = math.ceil(Fraction(str(self.capacity_factor)) * Fraction(str(self.top_k)) * group / self.experts)
        return groups * (min(group, most) if self.router == "expert-choice" else most)

    def assignments(self, samples: int, tokens: int) -> int:
        """Assignments of a micro-batch, as for `capacity`, if no expert gets more than its capacity."""
        slots = self.experts * self.capacity(samples, tokens)
        return slots if self.router == "expert-choice" else min(round(self.top_k * tokens), slots)

    def matrix_numbers(self, width: int) -> int:
        """Numbers in the matrices of one expert, for a residual stream of `width`."""
        return (3 if self.gated else 2) * width * self.expert_width

    @property
    def router_matrices(self) -> int:
        """Matrices of the router, of experts x width each."""
        return 2 if self.router == "noisy-topk" else 1

    @property
    def buffers(self) -> int:
        """Elements of the router's buffers: a bias per expert."""
        return self.experts if self.router == "sigmoid" else 0
