"""Words about steps whose loss or gradient norm is not finite."""

from pipeloom.training.optimizer_step import Rerun


def fault_words(rerun: Rerun) -> str:
    """Text about a step that was finite when it ran again."""
    return f"loss {rerun.loss} and gradient norm {rerun.grad_norm}, {_fault(rerun)}"


def stopped_words(rerun: Rerun | None) -> str:
    """The end of an error, after loss and norm."""
    if rerun is not None and rerun.finite:
        return (
            f", {_fault(rerun)}. Check the machine, and resume from the last checkpoint; --on_nonfinite retry uses the "
            "second result."
        )
    found = ""
    if rerun is not None:
        found = f"First not finite: {rerun.source or 'no layer, but a sum over micro-batches or ranks, or the norm'}. "
    return (
        f": training cannot continue. {found}Lower optimizer.learning_rate, or resume from an earlier checkpoint with "
        "another seed."
    )


def _fault(rerun: Rerun) -> str:
    ranks = ", ".join(map(str, rerun.ranks))
    seen = f", seen in the gradients of {'process' if len(rerun.ranks) == 1 else 'processes'} {ranks}" if ranks else ""
    return f"both finite when the step ran again: a hardware fault{seen}"
