"""How many layers each partition gets: by time or by memory, on a sample."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeloom.errors import InputError, folded
from pipeloom.pipe.arguments import checked_chunks, checked_devices
from pipeloom.pipe.micro_batches import check_value
from pipeloom.split.chain_partition import partition
from pipeloom.split.skippable import SkipKey, skip_values


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """The number of layers per partition for which the slowest partition takes the least time.

    Each layer runs forward and backward on a copy, in train mode; the module stays as it is.

    Args:
        partitions: how many partitions.
        module: the model.
        sample: a micro-batch: a tensor or a tuple of tensors.
        timeout: for how long rounds are repeated, in seconds; at least one round is measured.
        device: where the layers are measured; None: where they are.
    """
    layers = _Copies(partitions, module, sample, device)
    totals = [0.0] * len(layers.modules)
    layers.round()  # the first one allocates memory and chooses kernels
    begin = perf_counter()
    while True:
        totals = [total + seconds for total, seconds in zip(totals, layers.round(), strict=True)]
        if perf_counter() - begin > timeout:
            return partition(totals, partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """The number of layers per partition for which the largest partition takes the least memory.

    A layer counts with the tensors that its forward saves for a micro-batch, its output, and its parameters. It is
    counted on any device, also on the CPU.

    Args:
        partitions: how many partitions.
        module: the model.
        sample: a batch: a tensor or a tuple of tensors.
        chunks: into how many micro-batches the batch is split.
        param_scale: bytes held per byte of parameters: 2 with the gradient, 3 for SGD with momentum, 4 for Adam.
        device: where the layers run; None: where they are.
    """
    layers, chunks = _Copies(partitions, module, sample, device), checked_chunks(chunks)
    kept = layers.saved_bytes()
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers.modules]
    return partition([own * param_scale + saved / chunks for own, saved in zip(sizes, kept, strict=True)], partitions)


class _Copies:
    """Copies of a model's layers, to be measured. The random state stays as it was."""

    def __init__(
        self, partitions: int, module: nn.Sequential, sample: Any, device: torch.device | str | int | None
    ) -> None:
        if not isinstance(module, nn.Sequential):
            raise InputError(f"a {type(module).__name__}: must be an nn.Sequential, whose layers can be measured.")
        if not isinstance(partitions, int) or not 1 <= partitions <= len(module):
            raise InputError(
                f"partitions={folded(partitions)}: must be an integer from 1 to {len(module)}, the number of layers."
            )
        check_value(sample, "the sample")
        where = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
        self._device = where if device is None else checked_devices(device, 1)[0]
        self.modules = []
        for layer in module:
            for parameter in (found := copy.deepcopy(layer)).parameters():
                parameter.grad = None
            self.modules.append(found.to(self._device).train())
        self._sample = tree_map(lambda tensor: tensor.detach().to(self._device), sample)

    def round(self) -> list[float]:
        """Seconds of each layer's forward and backward."""
        with self._random_state_kept():
            return self._round()

    def _random_state_kept(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng([self._device] if self._device.type == "cuda" else [])

    def _round(self) -> list[float]:
        seconds = []
        value = self._sample
        skips: dict[SkipKey, Any] = {}
        for index, layer in enumerate(self.modules):
            given = self._fresh(value)
            begin = self._time()
            with torch.enable_grad(), skip_values(skips):
                value = layer(given)
            check_value(value, f"the output of layer {index}")
            skips.update({key: tree_map(_detached, skip) for key, skip in skips.items()})
            roots = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
            leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.requires_grad]
            wanted = [*leaves, *(each for each in layer.parameters() if each.requires_grad)]
            if roots and wanted:
                torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
            seconds.append(self._time() - begin)
        return seconds

    def saved_bytes(self) -> list[int]:
        """Bytes of the tensors that each layer's forward saves, and of its output."""
        with self._random_state_kept():
            return self._saved_bytes()

    def _saved_bytes(self) -> list[int]:
        found = []
        value = self._sample
        skips: dict[SkipKey, Any] = {}
        for index, layer in enumerate(self.modules):
            given = self._fresh(value)
            own = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *tree_leaves(given))}
            kept: dict[int, int] = {}

            def note(tensor: Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.enable_grad(), skip_values(skips), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
                value = layer(given)
            check_value(value, f"the output of layer {index}")
            for leaf in tree_leaves(value):
                note(leaf)
            found.append(sum(kept.values()))
        return found

    def _fresh(self, value: Any) -> Any:
        def leaf(tensor: Tensor) -> Tensor:
            tensor = tensor.detach().clone()
            return tensor.requires_grad_(tensor.is_floating_point())

        with torch.enable_grad():  # copies of the leaves: a layer may work in place
            return tree_map(lambda tensor: tensor * 1 if tensor.requires_grad else tensor, tree_map(leaf, value))

    def _time(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def by_parameters(layers: Sequence[nn.Module], partitions: int) -> list[int]:
    """The number of layers per partition for which the largest partition has the fewest bytes of parameters."""
    return partition([sum(each.nbytes for each in layer.parameters()) for layer in layers], partitions)
