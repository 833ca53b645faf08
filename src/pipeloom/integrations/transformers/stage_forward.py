"""`StageForward`: what stages run in place of the model's forward, and `StageLoss`: the loss of its result.

Trainer calls ``compute_loss(model, inputs)``, which calls the model and makes a loss of its outputs; users override it.
Every stage calls it: the model that it gets is this stage's part of the model, whose forward a stage leaves behind its
last layer. So only the last stage comes to the loss.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeloom.engine.batch import Batch
from pipeloom.errors import InputError
from pipeloom.integrations.transformers.arguments import as_one_device
from pipeloom.split.layouts.around import STANDS_FOR
from pipeloom.split.layouts.layout import find_layout
from pipeloom.split.planned.model_copy import modules_may_be_read
from pipeloom.split.planned.module_copies import HOOKS, shallow_copy
from pipeloom.training.losses.labels import NoticedNumber
from pipeloom.training.losses.loss_rule import LossRule
from pipeloom.training.losses.term_rules import Given, Rule


class StageForward:
    """Runs `Trainer.compute_loss` in the stages of a model.

    Args:
        trainer: the Trainer.
        rule: learns how losses of micro-batches combine.

    Attributes:
        number: `num_items_in_batch` of the batches that run, or None.
        with_loss: whether the model's outputs get a loss.
        left_out: names of the model's outputs that are not wanted.
        is_even: whether all micro-batches have as many labels per sample.
    """

    def __init__(self, trainer: Any, rule: LossRule) -> None:
        self._trainer = weakref.ref(trainer)  # the stages hold this object, and the trainer holds the stages
        self._rule = rule
        self.number: Tensor | None = None
        self.with_loss = self.is_even = True
        self.left_out: Sequence[str] = ()

    def expect(self, number: Any, *, with_loss: bool, is_even: bool, left_out: Sequence[str] = ()) -> None:
        """Set the attributes for the next run; `number` may be a number or a tensor."""
        trainer = self._trainer()
        assert trainer is not None
        self.number = None if number is None else torch.as_tensor(number, device=trainer.args.device)
        if with_loss:
            self._rule.begin_batch()
        self.with_loss, self.is_even, self.left_out = with_loss, is_even, left_out

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Inside, stages that are cut from the model run this forward; the model's own forward and hooks are inside it.

        Raises:
            InputError: the order of the model's layers is not known, or the model is none that can be saved.
        """
        if hasattr(model, "peft_config"):
            raise InputError(
                f"model={type(model).__name__} with adapters of peft: PipelineTrainer does not save adapters. Use "
                "`pipeloom train --model.pretrained DIR --model.lora RANK`."
            )
        if not isinstance(model, PreTrainedModel):
            raise InputError(
                f"model={type(model).__name__}: must be a PreTrainedModel. Train it with pipeloom.Pipeline."
            )
        if find_layout(model) is None:
            raise InputError(
                f"{type(model).__name__} has no pipeline plan. Name its layers in order with "
                "pipeloom.register_layout(ModelClass, ['embeddings', 'encoder.layer.*'])."
            )
        given = vars(model)
        before = {name: given[name] for name in HOOKS}
        own: Any = given.get("forward")

        def forward(shell: nn.Module, **inputs: Any) -> Any:
            return self._run(shell, own, before, inputs)

        setattr(forward, STANDS_FOR, own)
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
        labels = inputs.get("labels")
        # The label smoother's own loss is a mean over labels.
        watching = self._rule.watching() if trainer.label_smoother is None else nullcontext()
        with trainer.compute_loss_context_manager(), as_one_device(trainer.args), watching, modules_may_be_read():
            loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=number)
        divided = number is not None and number.was_read
        has_classes = isinstance(labels, Tensor) and labels.dim() and not labels.is_floating_point()
        sizes = [len(each) for each in inputs.values() if isinstance(each, Tensor) and each.dim()]
        seen = Given(labels if has_classes else None, self.is_even, num_samples=sizes[0] if sizes else 0)
        self._rule.learn(loss, seen, divided=divided)
        return {"loss": loss, "divided": divided, "outputs": self._kept(outputs)}

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

    Args:
        rule: of the loss; a mean over samples has other parts than one over labels.

    Attributes:
        shares: of the micro-batches of this replica, see `MicroBatch.shares`.
        divisor: of the losses, such as the number of batches in an update.
    """

    def __init__(self, rule: LossRule) -> None:
        self._rule = rule
        self.shares: Sequence[tuple[float, float] | None] = ()
        self.divisor = 1.0

    def told(self) -> str | None:
        """The text about a loss that may be another than that of the whole batch, once."""
        return self._rule.told()

    def count(self, targets: Any) -> tuple[int, int]:
        """Called by the engine: `weigh` does not depend on the labels of other replicas."""
        return 1, 1

    def weigh(self, batch: Batch, targets: Any, totals: tuple[int, int]) -> None:
        """Called by the engine: losses are parts of the sum already."""
        batch.weights = [1.0] * len(batch.weights)
        batch.targets = list(self.shares)

    def _share(self, shares: tuple[float, float]) -> float:
        if self._rule.rule is Rule.SUM:
            return 1.0
        return shares[self._rule.rule is Rule.SAMPLES]

    def __call__(self, output: Mapping[str, Any], shares: tuple[float, float] | None) -> Tensor:
        """The part of a micro-batch with these shares."""
        share = None if shares is None else self._share(shares)
        if share is None or (share == 0 and not output["divided"]):  # the mean over no label is not a number
            return zero_of(output["outputs"], output["loss"])
        loss: Tensor = output["loss"]
        if not output["divided"]:
            loss = loss * share
        return loss / self.divisor

    def of_evaluation(self, output: Mapping[str, Any]) -> Tensor:
        """The loss of this replica's part of a batch, from the losses of its micro-batches, [micro-batches]."""
        divided = output["divided"]
        shares = [None if each is None else self._share(each) for each in self.shares]
        pairs = zip(output["loss"].double(), shares, strict=True)
        parts = [loss if divided else loss * share for loss, share in pairs if share or (divided and share is not None)]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def zero_of(outputs: Any, loss: Tensor) -> Tensor:
    """0, with the graph of a model's outputs."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple) else [outputs]
    found = [value.sum() for value in values if isinstance(value, Tensor) and value.dim() and value.is_floating_point()]
    return 0.0 * (torch.stack(found).sum() if found else loss)
