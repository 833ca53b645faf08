"""`StageForward`: what stages run in place of the model's forward, and `StageLoss`: the loss of its result.

Trainer calls ``compute_loss(model, inputs)``, which calls the model and makes a loss of its outputs; users override it.
Every stage calls it: the model that it gets is this stage's part of the model, whose forward a stage leaves behind its
last layer. So only the last stage comes to the loss.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeloom.engine.batch import Batch
from pipeloom.errors import InputError
from pipeloom.integrations.transformers.arguments import as_one_device
from pipeloom.split.planned.layouts import find_layout
from pipeloom.split.planned.stand_ins import HOOKS, shallow_copy
from pipeloom.training.own_loss import NoticedNumber


class StageForward:
    """Runs `Trainer.compute_loss` in the stages of a model.

    Args:
        trainer: the Trainer.

    Attributes:
        number: `num_items_in_batch` of the batches that run, or None.
        with_loss: whether the model's outputs get a loss.
        left_out: names of the model's outputs that are not wanted.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)  # the stages hold this object, and the trainer holds the stages
        self.number: Tensor | None = None
        self.with_loss = True
        self.left_out: Sequence[str] = ()

    def expect(self, number: Any, *, with_loss: bool, left_out: Sequence[str] = ()) -> None:
        """Set the attributes for the next run; `number` may be a number or a tensor."""
        trainer = self._trainer()
        assert trainer is not None
        self.number = None if number is None else torch.as_tensor(number, device=trainer.args.device)
        self.with_loss, self.left_out = with_loss, left_out

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Inside, stages that are cut from the model run this forward; the model's own forward and hooks are inside it.

        Raises:
            InputError: the order of the model's layers is not known.
        """
        if find_layout(model) is None:
            raise InputError(
                f"{type(model).__name__} has no pipeline plan. Name its layers in order with "
                "pipeloom.register_layout(ModelClass, ['embeddings', 'encoder.layer.*'])."
            )
        if not isinstance(model, PreTrainedModel):
            raise InputError(f"{type(model).__name__} is no model of transformers. Train it with pipeloom.Pipeline.")
        given = vars(model)
        before = {name: given[name] for name in HOOKS}
        own: Any = given.get("forward")

        def forward(shell: nn.Module, **inputs: Any) -> Any:
            return self._run(shell, own, before, inputs)

        given["forward"] = MethodType(forward, model)
        given.update({name: OrderedDict() for name in HOOKS})
        try:
            yield
        finally:
            given.update(before)
            del given["forward"]
            if own is not None:
                given["forward"] = own

    def _run(self, shell: nn.Module, own: Any, hooks: Mapping[str, Any], inputs: dict[str, Any]) -> Any:
        trainer = self._trainer()
        assert trainer is not None
        model = shallow_copy(shell)
        given = vars(model)
        given.update(hooks)
        del given["forward"]
        if own is not None:
            given["forward"] = MethodType(own.__func__, model) if isinstance(own, MethodType) else own
        if trainer.accelerator.native_amp:
            given["forward"] = _in_lower_precision(trainer.accelerator, model.forward)
        if not self.with_loss:
            return {"outputs": self._kept(model(**inputs))}
        number = None if self.number is None else NoticedNumber.of(self.number)
        with trainer.compute_loss_context_manager(), as_one_device(trainer.args):
            loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=number)
        return {"loss": loss, "divided": number is not None and number.was_read, "outputs": self._kept(outputs)}

    def _kept(self, outputs: Any) -> Any:
        """The outputs as a plain dict or tuple, without the loss."""
        if isinstance(outputs, Mapping):
            return {k: v for k, v in outputs.items() if v is not None and k not in ("loss", *self.left_out)}
        if isinstance(outputs, tuple | list):
            return tuple(outputs[1:] if self.with_loss else outputs)
        return outputs


def _in_lower_precision(accelerator: Any, forward: Any) -> Any:
    """A forward in the mixed precision of accelerate, whose outputs are float32."""

    def run(*args: Any, **settings: Any) -> Any:
        with accelerator.autocast():
            outputs = forward(*args, **settings)
        return convert_to_fp32(outputs)

    return run


class StageLoss:
    """The part of a micro-batch's loss in that of the update.

    Attributes:
        shares: of the micro-batches of this replica, see `MicroBatch`.
        divisor: of the losses, such as the number of batches in an update.
    """

    def __init__(self) -> None:
        self.shares: Sequence[float | None] = ()
        self.divisor = 1.0

    def count(self, targets: Any) -> tuple[int, int]:
        """Called by the engine: `weigh` does not depend on the labels of other replicas."""
        return 1, 1

    def weigh(self, batch: Batch, targets: Any, totals: tuple[int, int]) -> None:
        """Called by the engine: losses are parts of the sum already."""
        batch.weights = [1.0] * len(batch.weights)
        batch.targets = list(self.shares)

    def __call__(self, output: Mapping[str, Any], share: float | None) -> Tensor:
        """The part of a micro-batch with this share."""
        if share is None or (share == 0 and not output["divided"]):  # the mean over no label is not a number
            return zero_of(output["outputs"], output["loss"])
        loss: Tensor = output["loss"]
        if not output["divided"]:
            loss = loss * share
        return loss / self.divisor

    def of_evaluation(self, output: Mapping[str, Any]) -> Tensor:
        """The loss of this replica's part of a batch, from the losses of its micro-batches, [micro-batches]."""
        divided = output["divided"]
        pairs = zip(output["loss"].double(), self.shares, strict=True)
        parts = [loss if divided else loss * share for loss, share in pairs if share or (divided and share is not None)]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def zero_of(outputs: Any, loss: Tensor) -> Tensor:
    """0, with the graph of a model's outputs."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple) else [outputs]
    found = [value.sum() for value in values if isinstance(value, Tensor) and value.dim() and value.is_floating_point()]
    return 0.0 * (torch.stack(found).sum() if found else loss)
