"""`Pipe`: a pipeline in one process, used like the model that it wraps."""

import sys
from collections.abc import Iterator
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError, PipeTypeError
from pipeloom.pipe.arguments import (
    check_module,
    checked_balance,
    checked_checkpoint,
    checked_chunks,
    checked_devices,
    partitions_of,
    placed_by_user,
)
from pipeloom.pipe.balance import balance_by_size, balance_by_time, by_parameters
from pipeloom.pipe.batch import PipeModel, run_batch
from pipeloom.pipe.batch_norm import DeferredBatchNorm
from pipeloom.pipe.calls.randomness import Randomness
from pipeloom.pipe.calls.stage_values import Partition
from pipeloom.pipe.micro_batches import Value, check_value, num_microbatches, split, tensors_of
from pipeloom.pipe.skips import SkipRoutes, skip_routes
from pipeloom.pipe.workers import Workers


class Pipe(nn.Module):
    """Runs an nn.Sequential as a pipeline of devices in one process (GPipe, arXiv:1811.06965; arXiv:2004.09910)::

        pipe = pl.Pipe(model, balance=[3, 3], devices=["cuda:0", "cuda:1"], chunks=8)
        loss = loss_fn(pipe(inputs), targets)  # targets on the last device
        loss.backward()
        optimizer.step()

    The batch is split into micro-batches along dimension 0. Each partition has a thread: partitions compute at the same
    time in the forward and in the backward, also on ``["cpu", "cpu"]``. Gradients are those of the model: the sum over
    micro-batches, last one first. Hooks of parameters run once per batch. `state_dict` has the names of the model's.

    Layers get and return a tensor or a tuple of tensors; `skippable` layers hand values to later ones. Layers that mix
    the samples of a batch, such as BatchNorm in train mode, see one micro-batch at a time.

    The model's layers are moved to their devices. Build the optimizer from ``pipe.parameters()``. Not supported: second
    derivatives through the pipe, and layers that share parameters.

    Args:
        module: the model: a plain nn.Sequential without hooks.
        balance: layers per partition; "time" or "size": measured on `sample` or else on the first batch
            (`balance_by_time`, `balance_by_size`); None: by parameter sizes, or where the layers are if they are on
            several devices.
        chunks: number of micro-batches per batch. Smaller batches have fewer, as with `torch.chunk`.
        devices: one per partition, and they may repeat; more are ignored, also those beyond the number of layers. None:
            all CUDA devices, else the CPU.
        checkpoint: which micro-batches recompute their activations in the backward: "always", "except_last" or "never".
        deferred_batch_norm: whether BatchNorms update their running statistics once per batch (`DeferredBatchNorm`).
        sample: a batch for ``balance="time"`` or ``"size"``.

    Raises:
        PipeTypeError: the module is no nn.Sequential, or its skips do not pair.
        TooFewDevices: fewer devices than partitions.
        InputError: an argument is invalid.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: list[int] | str | None = None,
        *,
        chunks: int = 1,
        devices: Any = None,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        sample: Value | None = None,
    ) -> None:
        super().__init__()
        check_module(module)
        if sample is not None:
            check_value(sample, "sample")
        self._chunks = checked_chunks(chunks)
        self._checkpoint = checked_checkpoint(checkpoint)
        # Not among the submodules: the user's module, and its layers as they were when they were last looked at.
        self.__dict__["_source"] = module, dict(module._modules)
        self._defers = deferred_batch_norm
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self._chunks)
        # Under their own names, which may be those of methods: an entry of state_dict keeps its name.
        self._modules.update({name: layer for name, layer in module._modules.items() if layer is not None})
        self.training = module.training
        plan = checked_balance(balance, len(self))
        placed = placed_by_user(module) if balance is None and devices is None else None
        if placed is not None:
            plan, devices = placed
        # Not among the submodules: their layers are the pipe's own.
        self.__dict__["_partitions"] = None
        self._workers: Workers | None = None
        self._devices = checked_devices(devices, len(plan) if isinstance(plan, list) else None)
        self._automatic = plan if isinstance(plan, str) else None
        if isinstance(plan, list):
            self._place(plan)
        elif self._automatic is None:
            self._place(by_parameters(list(self), min(len(self), len(self._devices))))
        elif sample is not None:
            self._place(self._measured(sample))

    # --- the model ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(cast("list[nn.Module]", list(self._modules.values())))

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    @property
    def balance(self) -> list[int]:
        """Layers per partition."""
        return [len(cast("nn.Sequential", each)) for each in self.partitions]

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition."""
        return list(self._devices)

    @property
    def chunks(self) -> int:
        """The number of micro-batches per batch."""
        return self._chunks

    @property
    def checkpoint(self) -> str:
        """Which micro-batches recompute their activations."""
        return self._checkpoint

    @property
    def partitions(self) -> nn.ModuleList:
        """The layers of each device, as an nn.Sequential.

        Raises:
            InputError: the balance is not measured yet.
        """
        found: nn.ModuleList | None = self.__dict__["_partitions"]
        if found is None:
            raise InputError(
                f"balance={self._automatic!r} is measured with the first batch: partitions are unknown before. "
                "Pass sample=."
            )
        return found

    def train(self, mode: bool = True) -> Self:
        """Set the layers and the partitions to train or eval mode."""
        super().train(mode)
        if self.__dict__["_partitions"] is not None:
            for partition in self.partitions:
                partition.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the number format; a pipe stays on its devices.

        Raises:
            PipeTypeError: another device is given.
        """
        given = [*args, *kwargs.values()]
        if "device" in kwargs or "tensor" in kwargs or any(_names_device(each) for each in given):
            raise PipeTypeError("a Pipe stays on its devices: only its number format changes. Give devices= to Pipe.")
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> Self:
        """Not supported: a pipe stays on its devices."""
        return self.to(device="cuda")

    def cpu(self) -> Self:
        """Not supported: a pipe stays on its devices."""
        return self.to(device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        """Without threads: a copy, or a pipe that was loaded, starts its own."""
        return {**self.__dict__, "_workers": None, "_randomness": None}

    # --- set-up ------------------------------------------------------------------------------------------------------

    def _measured(self, sample: Value) -> list[int]:
        number = min(len(self), len(self._devices))
        model = nn.Sequential(*self)
        device = self._devices[0]
        if self._automatic == "size":
            return balance_by_size(number, model, sample, chunks=self._chunks, device=device)
        microbatch = split(tensors_of(sample), self._chunks)[0]
        return balance_by_time(
            number, model, microbatch[0] if isinstance(sample, Tensor) else microbatch, device=device
        )

    def _place(self, balance: list[int]) -> None:
        """Cut the layers and move them to their devices."""
        self._devices = self._devices[: len(balance)]
        parts = partitions_of(list(self._modules.items()), balance)  # type: ignore[arg-type]
        for part, device in zip(parts, self._devices, strict=True):
            part.to(device).training = self.training
        self.__dict__["_partitions"] = parts
        self._learn()

    def _learn(self) -> None:
        """What follows from the partitions: the routes of skips, and what is found out while they run."""
        parts = [cast("nn.Sequential", part) for part in self.partitions]
        self._routes: SkipRoutes = skip_routes(parts)
        self._stages = [
            Partition(index, part, device, list(self._routes.sent[index]))
            for index, (part, device) in enumerate(zip(parts, self._devices, strict=True))
        ]
        self._randomness: Randomness | None = Randomness(alone=len(parts) == 1)

    def _prepare(self, value: Value) -> None:
        """Before a batch: measure what is not known, follow layers that were replaced, check where they are."""
        if self.__dict__["_partitions"] is None:
            self._place(self._measured(value))
        self._follow_source()
        replaced = False
        for part in self.partitions:
            for name in part._modules:
                replaced |= part._modules[name] is not self._modules[name]
                part._modules[name] = self._modules[name]
        if replaced:
            check_module(nn.Sequential(*self))
        if replaced or self._randomness is None:
            self._learn()
        if self._workers is None or not self._workers.usable:
            self._workers = Workers(self._devices)

    def _follow_source(self) -> None:
        """Take the layers that the user has replaced in the module of which this pipe was made."""
        source, seen = self.__dict__["_source"]
        if source._modules.keys() != seen.keys():
            raise InputError(
                f"the nn.Sequential of this Pipe has {len(source)} layers, and had {len(seen)}: a Pipe follows layers "
                "that are replaced alone. Make another Pipe."
            )
        for name, layer in source._modules.items():
            if layer is not seen[name]:
                seen[name] = layer
                convert = DeferredBatchNorm.convert_deferred_batch_norm
                self._modules[name] = convert(layer, self._chunks) if self._defers else layer

    # --- a batch -----------------------------------------------------------------------------------------------------

    def forward(self, input: Value, *others: Any) -> Value:
        """Run a batch.

        Args:
            input: a tensor or a tuple of tensors, with the batch in dimension 0. It is moved to the first device, and
                stays as it is where layers work in place.

        Returns:
            the model's output for the whole batch, on the last device.

        Raises:
            PipeTypeError: the input, or the output of a partition, is something else.
            InputError: the input has no batch dimension.
            Exception: the first one that a layer raised, with a note that names partition and micro-batch.
        """
        if others:
            raise PipeTypeError("a Pipe takes one value: a tensor or a tuple of tensors. Call it as pipe((x, y)).")
        check_value(input, "the input")
        # torch.compile leaves the batch alone, which threads compute. Where it is not loaded, this would load it.
        disable: Any = torch.compiler.disable if "torch._dynamo" in sys.modules else None
        output: Value = disable(self._run)(input) if disable else self._run(input)
        return output

    def _run(self, input: Value) -> Value:
        self._prepare(input)
        assert self._workers is not None
        assert self._randomness is not None
        for layer in self.modules():
            if isinstance(layer, DeferredBatchNorm):
                layer.begin(num_microbatches(input, self._chunks))
        model = PipeModel(self._stages, self._routes, self._workers, self._randomness)
        return run_batch(model, input, self._chunks, self._checkpoint if self.training else "never")


def _names_device(value: Any) -> bool:
    return isinstance(value, torch.device | str | Tensor) or (isinstance(value, int) and not isinstance(value, bool))
