"""Predicted bytes against what is really held: activations of the GPT, states of optimizers, units of copies, a run."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.autograd.recomputation import recomputed
from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.cli import main
from pipeloom.cli.common.optimizer_table import TRAINED
from pipeloom.ir.recompute import Recompute
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel import Precision, run_threads
from pipeloom.passes import lower
from pipeloom.plan.memory import (
    STATES,
    MemoryModel,
    gpt_layers,
    in_stages,
    memory_of_rank,
    memory_of_ranks,
    num_parameters,
    read_memory,
)
from pipeloom.plan.memory.rank_memory import update_memory
from pipeloom.plan.memory.state_bytes import NEED_FULL_MATRICES, state_elements
from pipeloom.slicing.context import GrowingSequence
from pipeloom.split import split
from pipeloom.split.chain_partition import partition
from pipeloom.train.config.sections import OptimizerConfig
from pipeloom.train.optimizers import make_optimizer
from pipeloom.train.trainer import Trainer
from tests.cpu.pairwise import in_turn, of_grid
from tests.cpu.ranks import run_ranks


@pytest.mark.parametrize(
    ("recompute", "positions", "dropout", "dtype"),
    of_grid(Recompute, ["rotary", "learned"], [0.0, 0.1], ["fp32", "bf16"]),
    ids=str,
)
def test_activations_of_every_stage_take_what_the_closed_form_says(dtype, dropout, positions, recompute):
    config = GPTConfig(
        vocabulary_size=70,
        layers=5,
        width=48,
        heads=3,
        sequence_length=40,
        dropout=dropout,
        positions=positions,
        tie_embeddings=False,
    )
    model = GPT(config)
    init_parameters(model, seed=0)
    number = {"fp32": torch.float32, "bf16": torch.bfloat16}[Precision(dtype).dtype]
    model = model.to(number)
    predicted = in_stages(gpt_layers(config, 2, number.itemsize), partition([1] * 5, 3))
    stages = split(model, 3)
    assert [[layer.name for layer in stage] for stage in predicted] == [list(names) for names in stages.layers]
    value, targets = torch.randint(0, 70, (2, 2, 40), dtype=torch.uint8)
    for stage, layers in zip(stages.modules, predicted, strict=True):
        assert num_parameters(layers) == sum(p.numel() for p in stage.parameters())
        assert sum(layer.buffer_elements for layer in layers) == sum(b.numel() for b in stage.buffers())
        kept = SavedBytes.beyond(stage)
        with kept.counting():
            output = recomputed(stage, recompute)(value)
            if stage is stages.modules[-1]:
                output = loss_fn(output.float(), targets)
        assert kept.now == sum(layer.kept_bytes[recompute] for layer in layers)
        value = output.detach().requires_grad_()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("amsgrad", lambda p: torch.optim.AdamW(p, amsgrad=True)),
        ("adafactor", torch.optim.Adafactor),
        ("muon", torch.optim.Muon),
    ],
)
def test_optimizers_keep_the_states_that_are_counted(name, make):
    shapes = [(6, 10)] if name == "muon" else [(6, 10), (7,)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for parameter in parameters:
        kept = sum(t.numel() for t in optimizer.state[parameter].values() if isinstance(t, Tensor) and t.dim())
        assert kept == state_elements(name, parameter.shape, in_block=True)


SMALL = {"vocabulary_size": 70, "layers": 8, "width": 48, "heads": 3, "sequence_length": 24}


def small_gpt() -> GPT:
    model = GPT(GPTConfig(**SMALL, tie_embeddings=False))
    init_parameters(model, seed=0)
    return model


def small_model(num_stages: int, precision: Precision, samples: int = 2) -> MemoryModel:
    layers = gpt_layers(GPTConfig(**SMALL, tie_embeddings=False), samples, 2 if precision.has_masters else 4)
    return MemoryModel(stages=in_stages(layers, partition([1] * 8, num_stages)), precision=precision)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "bfs"])
def test_activations_of_a_whole_step_peak_where_the_walk_says(name):
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4)
    pipe = pl.Pipeline(small_gpt(), schedule, loss_fn=loss_fn, transport="loopback")
    (held,) = [memory_of_ranks(lower(schedule), small_model(schedule.num_stages, Precision()))]
    inputs, targets = torch.randint(0, 70, (2, 8, 24), dtype=torch.uint8)
    kept = SavedBytes.beyond(*pipe.modules())
    with kept.counting():
        pipe.step(inputs, targets)
    pipe.close()
    assert kept.now == 0
    together = sum(rank.kinds["activations"] for rank in held)  # ranks take turns: their peaks need not be at one time
    assert kept.peak == together if name == "gpipe" else 0.5 * together < kept.peak <= together


class Case(NamedTuple):
    strategy: str
    granularity: str | None
    dtype: str
    gradients: str = "float32"
    bucket_bytes: int = 0
    away: bool = False  # main parameters in a file
    microbatches: int = 2


CASES = (
    Case("ddp", None, "fp32"),
    Case("ddp", None, "bf16", "same", 2**20),
    Case("parameter-server", None, "bf16"),
    Case("zero1", None, "bf16", bucket_bytes=50_000),
    Case("zero1", None, "fp32", microbatches=1),
    Case("ddp", None, "fp32", bucket_bytes=2**20, microbatches=1),
    Case("zero2", "chunk", "fp32", bucket_bytes=2**20),
    Case("zero2", "microbatch", "bf16", "same"),
    Case("zero3", "step", "bf16", bucket_bytes=2**20),
    Case("zero3", "chunk", "fp32"),
    Case("zero3", "microbatch", "bf16"),
    Case("zero3", "microbatch", "bf16", bucket_bytes=60_000),
    Case("ddp", None, "bf16", away=True),
    Case("zero3", "step", "bf16", bucket_bytes=60_000, away=True),
    Case("zero3", "microbatch", "fp32", away=True),
)


def _hold(rank: int, directory: str) -> list[tuple[dict[str, int], dict[str, float]]]:
    """What one of four processes holds, and what was predicted, in every case."""
    found = []
    mesh = pl.Mesh(pp=2, dp=2)
    for strategy, granularity, dtype, gradients, bucket_bytes, away, microbatches in CASES:
        schedule = pl.schedules.build("bfs", num_ranks=2, num_microbatches=microbatches)
        precision = Precision(dtype, gradients)
        pipe = pl.Pipeline(
            small_gpt(),
            schedule,
            loss_fn=loss_fn,
            mesh=mesh,
            data=pl.DataParallel(
                strategy, granularity, bucket_bytes=bucket_bytes, offload=f"disk:{directory}" if away else None
            ),
            precision=precision,
        )
        optimizer = torch.optim.AdamW(pipe.parameters())
        stepped = pl.OffloadedOptimizer(optimizer, None) if away else optimizer
        inputs, targets = torch.randint(0, 70, (2, 4, 24))
        pipe.memory.record_peaks()
        pipe.step(inputs, targets)
        held, peak = pipe.memory.held_bytes(), pipe.memory.peak_bytes()
        pl.update_parameters(stepped)
        states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
        measured = {
            "parameters": held.parameters,
            "masters": held.masters,
            "gathered": peak.gathered,
            "gradients": peak.gradients,
            "optimizer": sum(value.numel() * value.itemsize for value in states),
        }
        axis = pl.DataParallel(strategy, granularity).axis(2, separate_master=precision.has_masters)
        predicted = memory_of_rank(
            lower(schedule, data=axis),
            replace(
                small_model(schedule.num_stages, precision),
                device="cpu",
                bucket_bytes=bucket_bytes,
                elsewhere=frozenset({"masters"} if away else ()),
            ),
            mesh.coordinate("pp"),
            replica=mesh.coordinate("dp"),
        )
        if away:
            stepped.close()
        pipe.close()
        found.append((measured, dict(predicted.kinds)))
    return found


def test_copies_hold_what_the_closed_forms_say(tmp_path):
    """Two copies of two ranks of two stages. The forms take a stage's largest bucket for the first that is reduced."""
    for rank, of_cases in enumerate(run_ranks(_hold, 4, str(tmp_path))):
        for case, (measured, predicted) in zip(CASES, of_cases, strict=True):
            assert measured["gathered"] == predicted["gathered"], (rank, case)
            # What is away or not gathered is one NaN for each parameter; states of 16-bit numbers have as many bits.
            assert 0 <= measured["masters"] - predicted["masters"] <= 4 * 100 * case.away, (rank, case)
            assert 0 <= measured["parameters"] - predicted["parameters"] <= 4 * 100, (rank, case)
            assert measured["optimizer"] == predicted["optimizer"], (rank, case)
            block = (12 * 48**2 + 2 * 48) * (2 if case.gradients == "same" else 4)
            one_unit = case.bucket_bytes == 2**20  # of all layers of a stage
            assert 0 <= predicted["gradients"] - measured["gradients"] <= (0 if one_unit else block), (rank, case)


def _held_with(name: str, case: tuple[str, str]) -> list[tuple[dict[str, float], dict[str, float], int]]:
    """What each of two replicas holds when it updates with an optimizer, what is predicted, and its parameters."""
    strategy, dtype = case
    precision, schedule = Precision(dtype), pl.schedules.build("1f1b", num_ranks=1, num_microbatches=1)
    data = pl.DataParallel(strategy, layout="parameters" if name in NEED_FULL_MATRICES else "elements")
    model = replace(
        small_model(1, precision), optimizer=name, whole_parameters=data.layout == "parameters", bucket_bytes=0
    )
    program = lower(schedule, data=data.axis(2, separate_master=precision.has_masters))

    def replica() -> tuple[dict[str, float], dict[str, float], int]:
        with pl.Mesh(dp=2) as mesh:
            pipe = pl.Pipeline(
                small_gpt(),
                schedule,
                loss_fn=loss_fn,
                mesh=mesh,
                data=replace(data, bucket_bytes=0),
                precision=precision,
            )
            shapes = {key: part.shape for key, part in pipe.state.ranges.items()}
            config = OptimizerConfig(name=name)  # type: ignore[arg-type]
            optimizer = make_optimizer(pipe.named_parameters(), config, shapes, pipe.state.sharing.blocks)
            pipe.step(*torch.randint(0, 70, (2, 2, 24)))
            held = pipe.memory.held_bytes()
            pl.update_parameters(optimizer)
            states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
            predicted, count = update_memory(program, model, 0, replica=mesh.coordinate("dp"))
            pipe.close()
        measured = {"parameters": held.parameters, "masters": held.masters, "gradients": held.gradients}
        measured["optimizer"] = sum(value.nbytes for value in states)
        return measured, predicted, count

    return run_threads(2, replica)


@pytest.mark.parametrize(
    ("name", "case"),
    in_turn([name for name in STATES if name in TRAINED], [("ddp", "fp32"), ("zero1", "bf16"), ("zero3", "fp32")]),
    ids=str,
)
def test_every_optimizer_holds_what_the_table_says(name, case):
    for measured, predicted, count in _held_with(name, case):
        assert count == sum(p.numel() for p in small_gpt().parameters())
        assert measured["optimizer"] == predicted["optimizer"]
        gap = predicted["gradients"] - measured["gradients"]  # behind the last parameter of a replica
        assert 0 <= gap <= (0.03 * predicted["gradients"] if name in NEED_FULL_MATRICES and case[0] != "ddp" else 0)
        assert 0 <= measured["masters"] - predicted["masters"] <= 4 * 100
        assert 0 <= measured["parameters"] - predicted["parameters"] <= 4 * 100  # one NaN per parameter


def test_lion_is_algorithm_2_of_its_paper():
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    value, momentum = parameter.detach().clone(), torch.zeros(5, 3, dtype=torch.float64)
    optimizer = pl.Lion([parameter], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(4):
        parameter.grad = torch.randn_like(parameter)
        update = torch.sign(0.9 * momentum + (1 - 0.9) * parameter.grad)
        value -= 0.01 * (update + 0.1 * value)
        momentum = 0.99 * momentum + (1 - 0.99) * parameter.grad
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_writes_down_what_it_takes(ends, tmp_path, capsys, monkeypatch):
    if not ends:  # it is killed in its report
        monkeypatch.setattr(Trainer, "report", lambda *_: None)
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    words = "--steps 2 --eval_steps 0 --save_steps 0 --sample_tokens 0 --local true --model.layers 2 --model.width 48"
    sizes = "--model.heads 3 --model.sequence_length 32 --batch.size 8 --schedule gpipe --optimizer.name momentum"
    run = tmp_path / "run"
    line = f"{words} {sizes} --data.path {text}/*.txt --output_dir {run}"
    assert main(["train", *line.split()]) == 0
    (row,) = read_memory(run)
    for kind in ("parameters", "gradients", "optimizer", "buffers"):
        assert row.measured[kind] == row.predicted[kind] > 0, kind
    # token ids and targets of a run are parts of its batch, of 8 bytes each, as those of the prediction together
    assert row.measured["activations"] == row.predicted["activations"]
    capsys.readouterr()
    assert main(["memory", "--run", str(run)]) == 0
    assert capsys.readouterr().out.count("predicted") == 1


@pytest.mark.parametrize(
    ("num_slices", "recompute", "dropout", "kv_heads"),
    [
        (2, "none", 0.0, None),
        (4, "none", 0.0, None),
        (4, "none", 0.0, 2),
        (4, "selective", 0.0, 2),
        (2, "full", 0.0, None),
        (4, "none", 0.1, None),
        (4, "selective", 0.1, None),
        (4, "full", 0.1, 2),
    ],
)
def test_slices_hold_what_the_closed_form_says(monkeypatch, num_slices, recompute, dropout, kv_heads):
    """Keys, values and their gradients once per micro-batch. On the CPU, later slices keep attention's output twice."""
    alive: dict[int, GrowingSequence] = {}
    shared = 0

    def counted(method):
        def run(sequence, *arguments):
            nonlocal shared
            result = method(sequence, *arguments)
            alive[id(sequence)] = sequence
            shared = max(shared, sum(tensor.nbytes for each in alive.values() for tensor in each.tensors()))
            return result

        return run

    for name in ("__init__", "take_gradient"):
        monkeypatch.setattr(GrowingSequence, name, counted(getattr(GrowingSequence, name)))
    tokens, width, layers = 128, 48, 2
    sizes = {"vocabulary_size": 70, "layers": layers, "width": width, "heads": 4, "sequence_length": tokens}
    config = GPTConfig(**sizes, kv_heads=kv_heads, dropout=dropout, tie_embeddings=False)
    model = GPT(config)
    init_parameters(model, seed=0)
    schedule = pl.schedules.build("seq1f1b", num_ranks=1, num_microbatches=2, num_slices=num_slices)
    predicted = MemoryModel(stages=[gpt_layers(config, 2, 4)], recompute=[Recompute(recompute)])
    (held,) = memory_of_ranks(lower(schedule), predicted)
    pipe = pl.Pipeline(model, schedule, loss_fn=loss_fn, transport="loopback", recompute=recompute)
    inputs, targets = torch.randint(0, 70, (2, 4, tokens), dtype=torch.uint8)
    kept = SavedBytes.beyond(*pipe.modules())
    with kept.counting():
        pipe.step(inputs, targets)
    pipe.close()
    assert shared == held.kinds["slices"] > 0
    output, masks = 0.0, 0.0
    if recompute == "none" and not dropout:
        masks = sum(4 * (index + 2) * tokens // num_slices for index in range(1, num_slices))
        output = 0.0 if kv_heads else layers * 4 * 2 * tokens * width * (1 - 1 / num_slices)
    assert kept.peak - held.kinds["activations"] - output == pytest.approx(masks, abs=8 * num_slices)
