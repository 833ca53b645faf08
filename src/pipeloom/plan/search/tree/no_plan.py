"""Why a request has no plan. No torch here."""

from math import inf, prod

from pipeloom.common.quantities import bytes_text
from pipeloom.plan.search.request import Refusals, Request


def no_plan(request: Request, refusals: Refusals) -> str:
    """The message of a search that found no plan."""
    asked = f"--devices={request.devices} --batch.size={request.batch_size}"
    if refusals.least_bytes < inf:
        missing = refusals.least_bytes - request.memory_bytes
        return (
            f"{asked}: no plan fits into {bytes_text(request.memory_bytes)} per device; the smallest one found needs "
            f"{bytes_text(missing)} more. Use more devices, or devices with more memory."
        )
    reasons = "; ".join(f"{reason} ({number})" for reason, number in refusals.reasons.most_common(3))
    why = _undivided(request) or reasons or "the values of --fix exclude each other"
    return f"{asked}: no plan can run: {why}. Change devices, batch or --fix."


def _undivided(request: Request) -> str | None:
    """What the values of ``--fix`` do not divide."""
    for whole, size, names in (
        ("devices", request.devices, ("pipeline", "data", "tensor", "context")),
        ("samples", request.batch_size, ("data", "microbatches", "microbatch_size")),
    ):
        given = {name: request.fixed[name] for name in names if name in request.fixed}
        if size % prod(given.values()):
            return f"{size} {whole} cannot be divided by {' x '.join(f'{name}={n}' for name, n in given.items())}"
    return None
