"""`PipelineTrainer`: transformers' Trainer whose model runs on a pipeline."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers import checkpoints
from pipeloom.integrations.transformers.arguments import (
    act_as_one_process,
    as_many_processes,
    as_one_device,
    check_arguments,
)
from pipeloom.integrations.transformers.micro_batches import MicroBatch, are_even, cut_update
from pipeloom.integrations.transformers.optimizers import NamedParameters, keep_own_parameters, widen_gradients
from pipeloom.integrations.transformers.pipelined_model import FirstLoads, PipelinedModel, make_pipeline
from pipeloom.integrations.transformers.predictions import Predicted, labels_of, of_all_replicas, predicted
from pipeloom.integrations.transformers.processes import Processes
from pipeloom.integrations.transformers.schedules import make_schedule
from pipeloom.integrations.transformers.stage_forward import StageForward, StageLoss
from pipeloom.ir import Schedule
from pipeloom.parallel import DataParallel, Mesh, OffloadActivations, Precision
from pipeloom.slicing.context import hashed
from pipeloom.training import Pipeline, clip_grad_norm
from pipeloom.training.clipping import gradient_norms, total_norm
from pipeloom.training.losses.loss_rule import LossRule
from pipeloom.training.losses.term_rules import Rule
from pipeloom.training.optimizer_step import check_optimizer
from pipeloom.transport.interface import Transport
from pipeloom.transport.values import MicroBatches


class PipelineTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers has no types here
    """transformers' Trainer on a pipeline: change the class, add a schedule, and start the script with torchrun.

    A model that `Pipeline` does not cut by itself needs a layout (`pipeloom.register_layout`). Arguments, callbacks,
    logging, evaluation, checkpoint directories and learning rate schedulers are those of Trainer, and so are losses and
    updates. Each process keeps its stages on its device; `compute_loss`, also overridden, runs inside the last stage.

    An update's batches run as the micro-batches of one step of the schedule. Process 0 loads them. Methods that use the
    model, such as `train`, `evaluate`, `predict` and `save_model`, are called by every process.

    Args:
        args, kwargs: as for Trainer.
        schedule: the name of a schedule, for as many ranks as there are processes along axis pp, or a `Schedule`.
            Without a process group, all its ranks run in this process.
        num_microbatches: of an update, for a schedule given by name: a multiple of `gradient_accumulation_steps`. None:
            that number of batches, each cut further while there are fewer than two micro-batches per rank.
        mesh: axes pp and dp of the processes; None: one replica. `per_device_train_batch_size` is per replica.
        cut, transport, recompute, offload, data, precision, timeout_seconds: as for `pipeloom.Pipeline`. `bf16=True` of
            TrainingArguments is autocast, `precision="bf16"` parameters in bfloat16 with float32 masters.
            `activation_checkpointing=True` is `recompute="full"`.

    Raises:
        InputError: an option that a pipeline does not support, a model without a plan, an illegal schedule.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *others: Any,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int | None = None,
        mesh: Mesh | None = None,
        cut: str | Sequence[int] = "layers",
        transport: str | Transport = "auto",
        recompute: str | Sequence[str] | None = None,
        offload: OffloadActivations | None = None,
        data: DataParallel | str | None = None,
        precision: Precision | str | None = None,
        timeout_seconds: float = 1800.0,
        **kwargs: Any,
    ) -> None:
        args = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check_arguments(args)
        if precision is not None and args.bf16:
            raise InputError(f"precision={precision!r} with bf16=True: both choose a number format. Remove one.")
        args.device  # noqa: B018  # starts the process group under torchrun
        self._processes = processes = Processes()
        self._replica, self._num_replicas = (mesh.coordinate("dp"), mesh.degree("dp")) if mesh else (0, 1)
        self._schedule = make_schedule(schedule, num_microbatches, mesh, processes.size, args)
        act_as_one_process(args, processes, self._num_replicas)
        if args.activation_checkpointing:
            args.activation_checkpointing, recompute = False, recompute or "full"
        self._cut = cut
        self._options: dict[str, Any] = {
            "transport": transport,
            "recompute": recompute,
            "offload": offload,
            "mesh": mesh,
            "data": data,
            "precision": precision,
            "timeout_seconds": timeout_seconds,
        }
        self._pipelined: PipelinedModel | None = None
        self._close: Callable[[], Any] = lambda: None  # the pipeline
        self._pending: list[Any] = []
        self._preprocess: Any = None
        super().__init__(model, args, *others, **kwargs)

    # The model

    @property
    def pipe(self) -> Pipeline:
        """The pipeline; the first use makes it. Every process calls it."""
        return self._wrap_model(self.model).pipe

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> PipelinedModel:
        held = self._pipelined
        if held is None or held.module is not self.model:
            self._close()
            self._loss_rule = rule = LossRule(self.model)
            self._stage_loss, self._stage_forward = StageLoss(rule), StageForward(self, rule)
            with self._stage_forward.installed(self.model):
                rank = self._processes.rank if self._processes.size > 1 else None
                pipe = make_pipeline(
                    self.model, self._schedule, self._stage_loss, self._cut, self._options, rank, self.args.device
                )
            held = self._pipelined = PipelinedModel(self.model, pipe)
            self._close = weakref.finalize(self, held.pipe.close)
        return held

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Only this process's stages are moved, when the pipeline is made."""

    # Batches

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        self._pending = []
        load = super().get_batch_samples
        found: tuple[list[Any], Any] = self._processes.first_makes(lambda: load(epoch_iterator, num_batches, device))
        return found

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        with as_one_device(self.args):
            return super()._get_num_items_in_batch(batch_samples, device)

    def _cut_batches(self, batches: Sequence[Any]) -> list[MicroBatch]:
        """The micro-batches of this replica; sets their shares of the loss."""
        rule = self._loss_rule
        found = rule.rule in (Rule.LABELS, Rule.SHIFTED)
        pieces = cut_update(
            batches,
            self._schedule.num_microbatches,
            replica=self._replica,
            num_replicas=self._num_replicas,
            shifts_labels=rule.rule is Rule.SHIFTED if found else self._loss_shifts_labels,
            ignored=rule.ignored,
        )
        self._stage_loss.shares = [piece.shares for piece in pieces]
        return pieces

    # Training

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self._pending.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:  # more batches of this update follow
            return torch.zeros((), device=self.args.device)
        batches, self._pending = self._pending, []
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        pieces = self._cut_batches(batches)
        self._stage_loss.divisor = 1 if scaled else len(batches)
        self._stage_forward.expect(num_items_in_batch, with_loss=True, is_even=are_even(pieces))
        loss = self.pipe.step(
            MicroBatches(piece.inputs for piece in pieces),
            MicroBatches(torch.empty(piece.num_samples) for piece in pieces),
        )
        empty_every = self.args.torch_empty_cache_steps
        if empty_every is not None and self.state.global_step % empty_every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return loss.detach().to(self.args.device)

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return clip_grad_norm(self.pipe, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return grad_norm
        return total_norm(self.pipe, self.pipe.executor.connection.sum_over_processes(gradient_norms(self.pipe)))

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self._processes.rank > 0:  # else all stages would draw the same dropout masks
            torch.manual_seed(hashed(self.args.seed, self.state.global_step, self._processes.rank))
        return prepared

    # The optimizer

    def create_optimizer(self, model: Any = None) -> Any:
        pipe = self.pipe
        if isinstance(self.optimizer, AcceleratedOptimizer):  # of an earlier call of `train`
            return self.optimizer
        if self.optimizer is None:
            super().create_optimizer(NamedParameters(pipe, self.model))
        else:
            keep_own_parameters(self.optimizer, pipe)
        check_optimizer(pipe, self.optimizer)
        self.optimizer.register_step_pre_hook(widen_gradients)
        return self.optimizer

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        names: list[str] = super().get_decay_parameter_names(
            model.model if isinstance(model, NamedParameters) else model
        )
        return names

    # Evaluation

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        preprocess: Any = vars(self)["preprocess_logits_for_metrics"]
        self._preprocess = preprocess  # runs on the last stage, before predictions travel
        self.preprocess_logits_for_metrics = None
        try:
            output = super().evaluation_loop(FirstLoads(dataloader, self._processes), *args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics = preprocess
        return output._replace(metrics=self._processes.broadcast(output.metrics))

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Sequence[str] | None = None
    ) -> tuple[Any, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        with_loss, labels = labels_of(inputs, self.label_names, returns_loss=self.can_return_loss)
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        number = self._get_num_items_in_batch([inputs], self.args.device) if with_loss else None
        pieces = self._cut_batches([inputs])
        self._stage_loss.divisor = 1
        self._stage_forward.expect(number, with_loss=with_loss, is_even=are_even(pieces), left_out=ignore_keys)
        found = predicted(
            self.pipe.forward(MicroBatches(piece.inputs for piece in pieces)),
            inputs,
            labels,
            pieces,
            self._stage_loss,
            replica=(self._replica, self._num_replicas),
            preprocess=self._preprocess,
            loss_only=prediction_loss_only,
        )
        replicas = range(self._num_replicas)
        parts = [Predicted(*self._processes.broadcast((*found,), self._last_process(each))) for each in replicas]
        loss, logits = of_all_replicas(parts)
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)

    def _last_process(self, replica: int) -> int:
        """The process with the last stage of a replica."""
        rank, mesh = self._schedule.placement.replicas[-1][0], self._options["mesh"]
        if self._processes.size == 1:
            return 0
        return rank if mesh is None else int(mesh.shape.process({"pp": rank, "dp": replica}))

    # Checkpoints

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        directory = Path(self.args.output_dir if output_dir is None else output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        checkpoints.save_model(directory, self.pipe, tokenizer, self.args.to_json_string(), self._processes)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer.optimizer
        scheduler = self.lr_scheduler.state_dict()
        step = self.state.global_step
        checkpoints.save_state(Path(output_dir), step, self.pipe, optimizer, scheduler, self._processes)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoints.load_parameters(resume_from_checkpoint, self.pipe)

    def _load_best_model(self) -> None:
        checkpoints.load_parameters(self.state.best_model_checkpoint, self.pipe)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = checkpoints.load_optimizer(checkpoint, self.pipe, self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(state)

    def _save_rng_state(self, output_dir: str) -> None:
        with as_many_processes(self.args, self._processes.size):
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with as_many_processes(self.args, self._processes.size):
            super()._load_rng_state(checkpoint)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("PipelineTrainer does not search hyperparameters. Use Trainer, or one run per setting.")
