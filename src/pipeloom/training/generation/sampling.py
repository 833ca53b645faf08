"""Random draws of tokens, and the filters of models that have no generation configuration."""

from typing import NamedTuple

import torch
from torch import Tensor


class Draws:
    """The random numbers that choose tokens: those of ``torch.multinomial`` for a whole batch.

    A micro-batch takes its rows of them, so tokens do not depend on how the batch is cut. ``multinomial`` of one sample
    per row chooses ``argmax(p / q)`` with q from an exponential distribution.

    Args:
        num_samples: of the batch.
        num_microbatches: of the batch; each takes its rows of every round once.
        generator: None: torch's default generator.
    """

    def __init__(self, num_samples: int, num_microbatches: int, generator: torch.Generator | None) -> None:
        self._num_samples, self._num_microbatches, self._generator = num_samples, num_microbatches, generator
        self._rounds: list[Tensor] = []
        self._first = 0  # of the rounds that are kept

    def choose(self, probabilities: Tensor, first_row: int, number: int) -> Tensor:
        """Tokens [B] of the samples from `first_row`, for their `number`-th token.

        Args:
            probabilities: [B, V].
        """
        while self._first + len(self._rounds) <= number:
            device = probabilities.device if self._generator is None else self._generator.device
            drawn = torch.empty(self._num_samples, probabilities.shape[1], dtype=probabilities.dtype, device=device)
            self._rounds.append(drawn.exponential_(1, generator=self._generator).to(probabilities.device))
            if len(self._rounds) > 2:  # micro-batches are at most one token apart
                del self._rounds[0]
                self._first += 1
        rows = self._rounds[number - self._first][first_row : first_row + len(probabilities)]
        return (probabilities / rows).argmax(-1)


class Filters(NamedTuple):
    """What changes logits before a token is chosen.

    Attributes:
        do_sample: whether tokens are drawn; else the likeliest is taken.
        temperature: divides logits.
        top_k: keeps this many of the likeliest tokens; 0: all.
        top_p: keeps the likeliest tokens whose probabilities add up to this.
    """

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities of the next token, [B, V]."""
        scores = logits / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1.0:
            ascending, order = scores.sort(descending=False)
            removed = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            removed[..., -1:] = False
            scores = scores.masked_fill(removed.scatter(-1, order, removed), -torch.inf)
        return scores.softmax(-1)
