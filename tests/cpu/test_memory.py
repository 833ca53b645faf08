"""Predicted bytes against what torch really keeps: activations of the GPT, and states of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from pipeloom.ir.recompute import Recompute
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel import Precision
from pipeloom.plan.memory import GPTSizes, even_blocks, gpt_layers, in_stages
from pipeloom.plan.memory.states import state_elements
from pipeloom.runtime.recompute import recomputed
from pipeloom.split import split


@contextmanager
def kept_bytes(module: nn.Module) -> Iterator[Callable[[], int]]:
    """Bytes that autograd keeps in its time, every storage once, without the module's own."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("recompute", Recompute)
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
    sizes = GPTSizes(
        vocabulary_size=70,
        layers=5,
        width=48,
        heads=3,
        sequence_length=40,
        learned_positions=positions == "learned",
        dropout=bool(dropout),
    )
    predicted = in_stages(gpt_layers(sizes, 2, number.itemsize), even_blocks(5, 3))
    stages = split(model, 3)
    assert [[layer.name for layer in stage] for stage in predicted] == [list(names) for names in stages.layers]
    value, targets = torch.randint(0, 70, (2, 2, 40), dtype=torch.uint8)
    for stage, layers in zip(stages.modules, predicted, strict=True):
        assert sum(layer.num_parameters for layer in layers) == sum(p.numel() for p in stage.parameters())
        assert sum(layer.buffer_elements for layer in layers) == sum(b.numel() for b in stage.buffers())
        with kept_bytes(stage) as measured:
            output = recomputed(stage, recompute)(value)
            if stage is stages.modules[-1]:
                output = loss_fn(output.float(), targets)
        assert measured() == sum(layer.kept_bytes[recompute] for layer in layers)
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
