"""`LinkRate`: bandwidth and latency of one device's link. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """One device's link to another one that it shares a stage with, in one direction.

    Attributes:
        bytes_per_second: bandwidth; None for no limit.
        latency_seconds: latency per message.
        flow_bytes_per_second: bandwidth where every device sends as much to every other one; None: `bytes_per_second`.
    """

    bytes_per_second: float | None = None
    latency_seconds: float = 0.0
    flow_bytes_per_second: float | None = None
