"""Plans run as the same arguments and options do, to the last bit: in `Pipeline` and in `pipeloom train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pipeloom as pl
from pipeloom.cli import main
from pipeloom.errors import InputError
from pipeloom.models import GPT, init_parameters, loss_fn
from pipeloom.models.gpt_config import GPTConfig

from .train_runs import local, metrics, run, story, text

__all__ = ["text"]  # a fixture

CONFIG = GPTConfig(vocabulary_size=17, layers=4, width=16, heads=2, sequence_length=12)


def model(**sizes: Any) -> GPT:
    net = GPT(replace(CONFIG, **sizes))
    init_parameters(net, seed=3)
    return net


def gradients(net: nn.Module, *arguments: Any, **options: Any) -> list[torch.Tensor]:
    tokens = torch.randint(17, (2, 8, 12), generator=torch.Generator().manual_seed(5))
    pipe = pl.Pipeline(net, *arguments, loss_fn=loss_fn, **options)
    loss = pipe.step(tokens[0], tokens[1])
    found = [loss, *(p.grad.clone() for p in pipe.parameters() if p.grad is not None)]
    pipe.close()
    return found


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ({"schedule": "1f1b", "cut": [3, 1]}, {"cut": [3, 1]}),
        ({"schedule": "seq1f1b", "slices": [5, 7]}, {"slices": [5, 7]}),
        ({"schedule": "gpipe", "recompute": ["full", "none"]}, {"recompute": ["full", "none"]}),
        ({"schedule": "interleaved", "virtual_stages": 2, "cut": "parameters"}, {"cut": "parameters"}),
        ({"schedule": "zb-h1", "precision": "bf16", "gradients": "same"}, {"precision": pl.Precision("bf16", "same")}),
        ({"schedule": "1f1b", "offload": "cpu", "offload_activations": 0}, {}),  # on the CPU nothing moves
        ({"schedule": pl.schedules.gpipe(num_ranks=2, num_microbatches=4)}, {}),
    ],
)
def test_a_plan_gives_what_the_arguments_give(plan: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    made = pl.Plan(pipeline=2, microbatches=4, **plan)
    made.save(tmp_path / "plan.json")
    planned = gradients(model(), pl.Plan.load(tmp_path / "plan.json"))
    expected = gradients(model(), made.make_schedule(), **options)
    assert len(planned) == len(expected) > 1
    assert all(torch.equal(one, other) for one, other in zip(planned, expected, strict=True))
    repeated = gradients(model(), made, **options)  # arguments that agree
    assert all(torch.equal(one, other) for one, other in zip(repeated, expected, strict=True))


def test_a_plan_knows_processes_that_share_a_stage() -> None:
    made = pl.Plan(schedule="1f1b", pipeline=2, microbatches=4, tensor=2, context=2, context_kind="ring-plain")

    def each() -> bool:
        with pl.Mesh(pp=2, cp=2, tp=2) as mesh, pl.Mesh(pp=4, tp=2) as other:
            cut = pl.parallelize(model(), mesh)
            with pytest.raises(InputError, match=r"the plan has tensor=2, and no mesh is given\. Cut the model with"):
                pl.Pipeline(cut, made, loss_fn=loss_fn)
            with pytest.raises(InputError, match=r"mesh has pp=4: the plan has 2\. Use pp=2\."):
                pl.Pipeline(cut, made, loss_fn=loss_fn, mesh=other)
            with pytest.raises(InputError, match=r"context='ring': the plan has context=ring-plain\. Remove it"):
                pl.Pipeline(cut, made, loss_fn=loss_fn, mesh=mesh, context="ring")
            planned = gradients(cut, made, mesh=mesh)
            expected = gradients(pl.parallelize(model(), mesh), made.make_schedule(), mesh=mesh, context="ring-plain")
        return len(planned) > 1 and all(torch.equal(a, b) for a, b in zip(planned, expected, strict=True))

    assert all(pl.run_threads(8, each, timeout_seconds=120.0))


def test_a_plan_knows_processes_that_share_experts() -> None:
    made = pl.Plan(schedule="1f1b", pipeline=2, microbatches=2, data=2, expert=2)

    def each() -> bool:
        with pl.Mesh(pp=2, dp=2, ep=2) as mesh, pl.Mesh(pp=2, dp=2) as other:
            cut = pl.parallelize(model(experts=4, experts_every=2), mesh)
            with pytest.raises(InputError, match=r"the plan has expert=2, and no mesh is given\. Cut the model with"):
                pl.Pipeline(cut, made, loss_fn=loss_fn)
            with pytest.raises(InputError, match=r"mesh has ep=1: the plan has 2\. Use ep=2\."):
                pl.Pipeline(cut, made, loss_fn=loss_fn, mesh=other)
            planned = gradients(cut, made, mesh=mesh)
            again = pl.parallelize(model(experts=4, experts_every=2), mesh)
            expected = gradients(again, made.make_schedule(), mesh=mesh)
        return len(planned) > 1 and all(torch.equal(a, b) for a, b in zip(planned, expected, strict=True))

    assert all(pl.run_threads(4, each, timeout_seconds=120.0))


def test_offloaded_activations_of_a_plan_move_to_a_file(tmp_path: Path) -> None:
    place = f"disk:{tmp_path}"
    made = pl.Plan(schedule="1f1b", pipeline=2, microbatches=4, offload=place, offload_activations=0)
    planned = gradients(model(), made)
    expected = gradients(model(), made.make_schedule(), offload=pl.OffloadActivations(place))
    assert all(torch.equal(one, other) for one, other in zip(planned, expected, strict=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cut": [1, 3]}, "cut=[1, 3]: the plan has cut=[3, 1]. Remove it, or make a new plan."),
        ({"cut": "layers"}, "cut='layers': the plan has cut=[3, 1]"),
        ({"recompute": "none"}, "recompute='none': the plan has recompute=['full', 'none']"),
        ({"recompute": "none,full"}, "recompute='none,full': the plan has recompute=['full', 'none']"),
        ({"precision": "fp16"}, "precision='fp16': the plan has precision=bf16"),
        ({"data": "zero1"}, "data='zero1': the plan has data_strategy=zero3"),
        ({"offload": pl.OffloadActivations("cpu")}, "the plan has offload=None"),
    ],
)
def test_arguments_that_contradict_the_plan_are_refused(options: dict[str, Any], said: str) -> None:
    plan = pl.Plan(
        schedule="1f1b", pipeline=2, microbatches=4, cut=[3, 1], recompute=["full", "none"], precision="bf16",
        data_strategy="zero3", offload="cpu", offload_states=True,
    )  # fmt: skip
    with pytest.raises(InputError) as error:
        pl.Pipeline(model(), plan, loss_fn=loss_fn, **options)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_replicas_of_a_plan_need_a_process_group() -> None:
    plan = pl.Plan(schedule="1f1b", pipeline=2, microbatches=4, data=2)
    with pytest.raises(InputError, match="process group"):
        pl.Pipeline(model(), plan, loss_fn=loss_fn)


def test_a_stream_of_a_plan_is_the_stream_of_its_schedule() -> None:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)]
    plan = pl.Plan(schedule="pipedream", pipeline=2, microbatches=1, replicas=[2, 1], cut=[2, 1])
    pipe = pl.Pipeline(nn.Sequential(*layers), plan, loss_fn=cross_entropy)
    assert pipe.schedule.microbatches_per_update == 1
    assert pipe.schedule.num_ranks == 3
    pipe.close()


@pytest.mark.parametrize("kind", ["partition", "slice", "memory"])
def test_a_planned_run_is_the_run_of_its_options(text: Path, tmp_path: Path, kind: str) -> None:
    """The plan of each command: losses equal those of a run by options, and of the saved configuration."""
    path, few = str(tmp_path / "plan.json"), ["--steps=4", "--eval_steps=4", "--save_steps=4", "--sample_tokens=0"]
    sizes = ["--model.layers", "3", "--model.width", "16", "--model.heads", "2"]
    if kind == "partition":
        pl.Plan(schedule="pipedream", pipeline=2, microbatches=1, replicas=[2, 1], cut=[2, 1]).save(path)
        flags = ["--schedule=pipedream", "--parallel.pipeline=2", "--parallel.replicas=2,1", "--parallel.cut=2,1"]
        more = ["--batch.microbatches=1"]
        free = []
    elif kind == "slice":
        costs = tmp_path / "costs.json"
        rows = '{"base": [[8, 1], [64, 8]]}'
        costs.write_text(f'{{"forward": {rows}, "backward": {rows}}}')
        words = ["--sequence", "32", "--ranks", "2", "--batch", "4", "--schedule", "seq1f1b", "--costs", str(costs)]
        assert main(["slice", *words, "--out", path]) == 0
        plan = pl.Plan.load(path)
        lengths = ",".join(map(str, plan.slice_lengths or ()))
        flags = ["--schedule=seq1f1b", "--parallel.pipeline=2", f"--parallel.slices={lengths}"]
        more = [f"--batch.microbatches={plan.microbatches}", "--batch.size=4"]
        free = ["--model.sequence_length=32"]
    else:
        words = ["--model.sequence_length", "32", "--batch.size", "8", "--batch.microbatches", "4"]
        assert main(["memory", *sizes, *words, "--memory.cap", "340KiB", "--out", path]) == 0
        plan = pl.Plan.load(path)
        assert plan.recompute is not None
        flags = [f"--memory.recompute={','.join(plan.recompute)}", "--parallel.pipeline=2"]
        more = ["--batch.microbatches=4", "--batch.size=8"]
        free = ["--model.sequence_length=32"]
    model_words = [f"{name}={value}" for name, value in zip(sizes[::2], sizes[1::2], strict=True)]
    arguments = [*few, *free, *model_words]
    base = ["train", f"--data.path={text}", "--local", *arguments]
    for name, chosen in (("planned", [f"--plan={path}"]), ("flags", [*flags, *more])):
        assert main([*base, *chosen, f"--output_dir={tmp_path / name}"]) == 0
    losses = [row["loss"] for row in metrics(tmp_path / "planned") if "loss" in row]
    assert losses == [row["loss"] for row in metrics(tmp_path / "flags") if "loss" in row]
    assert len(losses) == 4
    Path(path).unlink()
    saved = ["--config", str(tmp_path / "planned" / "config.yaml"), f"--output_dir={tmp_path / 'again'}"]
    assert main(["train", *saved]) == 0
    assert losses == [row["loss"] for row in metrics(tmp_path / "again") if "loss" in row]


def test_a_planned_run_of_processes_goes_on_from_its_checkpoint(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    orders = pl.schedules.zb_h1(num_ranks=2, num_microbatches=4)
    pl.Plan(schedule=orders, pipeline=2, microbatches=4).save(path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    local(text, whole, f"--plan={path}", "--batch.microbatches=4", "--steps=6", "--save_steps=3")
    for more in (["--steps=3"], ["--steps=6", "--resume_from_checkpoint", "latest"]):
        done = run(text, parts, f"--plan={path}", "--batch.microbatches=4", "--save_steps=3", *more)
        assert done.returncode == 0, done.stderr
    assert [row[:2] for row in story(parts)][-1] == [row[:2] for row in story(whole)][-1]
