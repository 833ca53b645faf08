"""The graph of one call, which ends at the call's own inputs and parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from pipeloom.errors import RunError
from pipeloom.pipe.calls.stage_values import Partition


@contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Holds back the hooks of parameters: they run once, on the gradient of the batch, in the user's backward."""
    held = [(hooks, dict(hooks)) for parameter in parameters if (hooks := parameter._backward_hooks)]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)


@contextmanager
def naming_reentrant_checkpoints(place: str) -> Iterator[None]:
    """Around a backward for chosen tensors, which torch's reentrant checkpoints do not support.

    Raises:
        RunError: the graph has one.
    """
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise RunError(
            f"{place} calls torch.utils.checkpoint with use_reentrant=True, which a Pipe does not support: its "
            "backward computes the gradients of each partition on its own. Use use_reentrant=False."
        ) from error


def check_leaves(partition: Partition, roots: Sequence[Tensor], known: Sequence[Tensor | None]) -> None:
    """Check that the graph has no other leaves, whose gradients would be lost."""
    expected = {id(leaf) for leaf in known if leaf is not None}
    coming = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = {*coming, *(tensor.grad_fn for tensor in known if tensor is not None and tensor.grad_fn is not None)}
    while coming:
        node = coming.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in expected:
            raise RunError(
                f"{partition.name} uses a tensor of shape {tuple(leaf.shape)} that requires gradients and is neither a "
                "parameter of its layers nor their input. Register it as an nn.Parameter, or pass it as an input."
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                coming.append(following)
