"""PipelineTrainer trains as Trainer in one process."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pipeloom as pl
from pipeloom.errors import InputError
from tests.cpu.ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed (the extra 'trainer')")
pytest.importorskip("accelerate", reason="accelerate is not installed (the extra 'trainer')")

from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainerCallback

from pipeloom.integrations.transformers import PipelineTrainer
from pipeloom.integrations.transformers.micro_batches import cut_update
from tests.cpu.trainer_cases import arguments, bert, classified, history, llama, padded, sequences

SAMPLES = sequences()


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train(kind: type[Trainer], directory: Path, **options: Any) -> Trainer:
    """A Trainer of a tiny Llama that has trained, on padded sequences."""
    changes = options.pop("changes", {})
    given = {"data_collator": padded, "train_dataset": SAMPLES, "eval_dataset": SAMPLES[:13]}
    trainer = kind(options.pop("model", None) or llama(), arguments(directory, **changes), **{**given, **options})
    trainer.train()
    return trainer


def schedule(num_microbatches: int, name: str = "1f1b", num_ranks: int = 2) -> pl.Schedule:
    return pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)


def same_parameters(trainer: PipelineTrainer, model: torch.nn.Module, **tolerance: float) -> None:
    values = trainer.pipe.state_dict()
    for name, value in model.state_dict().items():
        if name in values:
            torch.testing.assert_close(values[name], value, **(tolerance or {"rtol": 0.0, "atol": 0.0}))


def close(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-6) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=1e-9)


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in history(trainer) if "loss" in row]


def test_a_language_model_trains_as_with_trainer(tmp_path: Path) -> None:
    changes = {"eval_strategy": "epoch"}
    expected = train(Trainer, tmp_path, changes=changes, compute_metrics=accuracy)
    found = train(PipelineTrainer, tmp_path, changes=changes, compute_metrics=accuracy, schedule=schedule(3))
    close(history(found), history(expected))
    assert losses(found)[0] == losses(expected)[0]  # later ones depend on the alignment of sums in their last bit
    same_parameters(found, expected.model, rtol=1e-4, atol=1e-5)
    assert any("eval_accuracy" in row for row in history(found))


def test_batches_are_cut_into_more_micro_batches(tmp_path: Path) -> None:
    changes = {"eval_strategy": "epoch", "lr_scheduler_type": "cosine"}
    expected = train(Trainer, tmp_path, changes=changes)
    found = train(PipelineTrainer, tmp_path, changes=changes, schedule=schedule(6, "zb-h1"))
    close(history(found), history(expected))


def test_one_rank_is_enough(tmp_path: Path) -> None:
    expected = train(Trainer, tmp_path, changes={"max_steps": 2})
    found = train(PipelineTrainer, tmp_path, changes={"max_steps": 2})
    assert found.pipe.schedule.num_ranks == 1
    close(history(found), history(expected))


class Weighted:
    """A loss of the user's, from the model's logits and a weight per class."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 2.0, 3.0])
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weights)
        return (loss, outputs) if return_outputs else loss


class WeightedTrainer(Weighted, Trainer):
    pass


class WeightedPipelineTrainer(Weighted, PipelineTrainer):
    pass


class OfSamples:
    """A mean over samples, whose numbers of labels differ."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        numbers = (inputs.pop("labels") != -100).sum(-1) / 10
        outputs = model(**inputs)
        loss = torch.nn.functional.mse_loss(outputs.logits[:, 0, 0], numbers)
        return (loss, outputs) if return_outputs else loss


class TrainerOfSamples(OfSamples, Trainer):
    pass


class PipelineTrainerOfSamples(OfSamples, PipelineTrainer):
    pass


def test_a_mean_over_samples_is_trained_as_with_trainer(tmp_path: Path) -> None:
    changes = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    expected = train(TrainerOfSamples, tmp_path, changes=changes)
    found = train(PipelineTrainerOfSamples, tmp_path, changes=changes, schedule=schedule(6))
    close(history(found), history(expected))


class Steps(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(("step", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.seen.append(("evaluation", state.global_step))


@pytest.mark.parametrize(
    ("kinds", "changes"),
    [
        ((Trainer, PipelineTrainer), {}),
        ((Trainer, PipelineTrainer), {"label_smoothing_factor": 0.1, "bf16": True}),
        ((WeightedTrainer, WeightedPipelineTrainer), {"gradient_accumulation_steps": 1}),
    ],
    ids=["own loss", "label smoothing and bf16", "a loss of the user's"],
)
def test_a_classifier_with_a_layout_trains_as_with_trainer(kinds: Any, changes: Any, tmp_path: Path) -> None:
    def run(kind: type[Trainer], **options: Any) -> tuple[Trainer, list[tuple[str, int]]]:
        steps = Steps()
        callbacks = [steps, EarlyStoppingCallback(early_stopping_patience=1)]
        more = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "accuracy", **changes}
        given = {"data_collator": classified, "compute_metrics": accuracy, "callbacks": callbacks}
        return train(kind, tmp_path, model=bert(), changes=more, **given, **options), steps.seen

    expected, expected_steps = run(kinds[0])
    number = changes.get("gradient_accumulation_steps", 3)
    found, steps = run(kinds[1], schedule=schedule(number))
    assert steps == expected_steps
    close(history(found), history(expected))
    predictions, expected_predictions = (each.predict(SAMPLES[:5]).predictions for each in (found, expected))
    torch.testing.assert_close(torch.from_numpy(predictions), torch.from_numpy(expected_predictions))


def test_a_run_resumes_bitwise_from_its_checkpoint_directory(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    model = llama(attention_dropout=0.1)
    found = train(PipelineTrainer, tmp_path, model=model, changes=changes, schedule=schedule(3))
    saved = tmp_path / "checkpoint-2"
    names = {path.name for path in saved.iterdir()}
    assert names >= {"config.json", "model.safetensors", "trainer_state.json", "training_args.json", "pipeline"}
    torch.manual_seed(7)  # whatever happens in the new process
    again = PipelineTrainer(
        llama(attention_dropout=0.1),
        arguments(tmp_path, **changes),
        data_collator=padded,
        train_dataset=SAMPLES,
        eval_dataset=SAMPLES[:13],
        schedule=schedule(3),
    )
    again.train(resume_from_checkpoint=str(saved))
    assert history(again)[-3:-1] == history(found)[-3:-1]
    for name, value in found.pipe.state_dict().items():
        assert torch.equal(again.pipe.state_dict()[name], value), name
    again.save_model(str(tmp_path / "final"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    same_parameters(again, loaded)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    changes |= {"load_best_model_at_end": True, "learning_rate": 1.0, "warmup_steps": 0, "save_total_limit": 1}
    expected = train(Trainer, tmp_path / "trainer", changes=changes)
    found = train(PipelineTrainer, tmp_path / "pipeline", changes=changes, schedule=schedule(3))
    best = Path(expected.state.best_model_checkpoint).name
    assert Path(found.state.best_model_checkpoint).name == best
    same_parameters(found, expected.model, rtol=1e-4, atol=1e-5)


def in_process(rank: int, directory: str, dp: int, changes: dict[str, Any]) -> tuple[Any, Any, Any]:
    mesh = pl.Mesh(pp=dist.get_world_size() // dp, dp=dp) if dp > 1 else None
    masked = MaskedBatches()
    trainer = train(
        PipelineTrainer,
        Path(directory),
        changes={"per_device_train_batch_size": 4 // dp, "per_device_eval_batch_size": 8 // dp, **changes},
        data_collator=masked,
        compute_metrics=accuracy,
        mesh=mesh,
        num_microbatches=3,
    )
    values = {name: value.numpy() for name, value in trainer.pipe.state_dict().items()}
    logged = history(trainer)
    trainer.evaluate()
    trainer.pipe.close()
    return logged, values, masked.calls


class MaskedBatches:
    """A collator that draws random masks, as for masked language models."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        self.calls += 1
        batch = padded(samples)
        masked = torch.rand(batch["input_ids"].shape) < 0.2
        return {**batch, "labels": batch["labels"].masked_fill(~masked, -100)}


@pytest.mark.parametrize(
    ("processes", "dp"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.whole_grid)], ids=["pp2", "dp2 pp2"]
)
def test_processes_train_as_trainer_in_one_process(processes: int, dp: int, tmp_path: Path) -> None:
    changes = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 2}
    given = {"data_collator": MaskedBatches(), "compute_metrics": accuracy}
    expected = train(Trainer, tmp_path / "trainer", changes=changes, **given)
    found = run_ranks(in_process, processes, str(tmp_path / "processes"), dp, changes)
    values: dict[str, Any] = {}
    for rank, (logged, held, calls) in enumerate(found):
        close(logged, history(expected), 2e-6)
        assert bool(calls) == (rank == 0)
        values |= held
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(torch.from_numpy(values[name]), value, rtol=1e-4, atol=1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "processes" / "checkpoint-2")
    of_trainer = AutoModelForCausalLM.from_pretrained(tmp_path / "trainer" / "checkpoint-2")
    for name, value in of_trainer.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_what_a_pipeline_does_not_support_is_one_line(tmp_path: Path) -> None:
    def refused(expected: str, changes: dict[str, Any] | None = None, model: Any = None, **options: Any) -> None:
        with pytest.raises(InputError, match=expected) as error:
            PipelineTrainer(model or llama(), arguments(tmp_path, **(changes or {})), **options).pipe  # noqa: B018
        assert "\n" not in str(error.value)

    refused("fp16=True: PipelineTrainer does not support it", {"fp16": True})
    refused("torch_compile=True", {"torch_compile": True})
    refused("auto_find_batch_size", {"auto_find_batch_size": True})
    refused("optim='lomo'", {"optim": "lomo"})
    refused("num_microbatches=4: must be a multiple of gradient_accumulation_steps=3", schedule=schedule(4))
    refused("schedule='no-such'|no-such", schedule="no-such")
    refused("schedule=3: must be the name", schedule=3)
    refused("model=Linear: must be a PreTrainedModel", model=torch.nn.Linear(2, 2))
    with_adapters = llama()
    with_adapters.peft_config = {}
    refused("model=LlamaForCausalLM with adapters of peft: .*--model.lora RANK", model=with_adapters)
    refused("precision='bf16' with bf16=True", {"bf16": True}, precision="bf16")
    trainer = PipelineTrainer(llama(), arguments(tmp_path, gradient_accumulation_steps=1), data_collator=padded)
    with pytest.raises(InputError, match="no training state of a pipeline"):
        trainer._load_from_checkpoint(str(tmp_path))


def test_another_model_has_another_pipeline_and_the_earlier_one_is_freed(tmp_path: Path) -> None:
    trainer = PipelineTrainer(
        None,
        arguments(tmp_path, max_steps=1),
        model_init=lambda trial: llama(),
        data_collator=padded,
        train_dataset=SAMPLES,
        schedule=schedule(3),
    )
    trainer.train()
    assert trainer._loss_rule._model == "LlamaForCausalLM"
    first = weakref.ref(trainer.pipe)
    trainer.train()
    gc.collect()
    assert first() is None


def test_every_sample_is_in_one_micro_batch_and_shares_add_up() -> None:
    batches = [padded(SAMPLES[:5]), padded(SAMPLES[5:6])]
    for number in (2, 3, 6, 8):
        pieces = [cut_update(batches, number, replica=replica, num_replicas=2) for replica in (0, 1)]
        assert all(len(each) == number for each in pieces)
        counted = [piece for each in pieces for piece in each if piece.share is not None]
        assert sum(piece.num_samples for piece in counted) == 6
        assert sum(piece.share for piece in counted) == pytest.approx(2.0)
    with pytest.raises(InputError, match="an update has 2 batches"):
        cut_update(batches, 1)
