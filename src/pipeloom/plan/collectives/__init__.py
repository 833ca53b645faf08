"""Collectives as lists of sends: who sends what in which step, what that costs, and how it looks. No torch here."""

from pipeloom.plan.collectives.algorithms import ALGORITHMS, Algorithm
from pipeloom.plan.collectives.cost import collective_seconds, equal_bytes, link_of
from pipeloom.plan.collectives.picture import picture
from pipeloom.plan.collectives.sends import COLLECTIVES, Send, Step, replay, transposed

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "Algorithm",
    "Send",
    "Step",
    "collective_seconds",
    "equal_bytes",
    "link_of",
    "picture",
    "replay",
    "transposed",
]
