"""`pipeloom.plan`: any module is measured, planned by the search, and its plan runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.plan.costs.named_clusters import CLUSTERS
from pipeloom.plan.module_plan import _input_backward
from pipeloom.split.layer_rows import measure_calls, measure_layers
from pipeloom.split.profile import LayerTime


def layers(count: int = 4, width: int = 32) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)))


def loss_fn(output, targets):
    return ((output - targets) ** 2).mean()


EXAMPLE = torch.zeros(8, 32), torch.zeros(8, 32)
DGX = CLUSTERS["dgx-a100-80"]
NO_HOST = replace(DGX, device=replace(DGX.device, host_bytes_per_second=None))


def test_a_plan_of_any_module_runs_as_it_says():
    torch.manual_seed(0)
    model = layers()
    found = pl.plan(
        model, EXAMPLE, loss_fn=loss_fn, cluster="dgx-a100-80", devices=2, global_batch_size=16,
        fix="pipeline=2,data=1,microbatch_size=4", num_rounds=1,
    )  # fmt: skip
    assert (found.pipeline, found.data, found.microbatches, found.batch_size) == (2, 1, 4, 16)
    assert sum(found.cut) == 4
    assert found.predicted_step_seconds > 0
    inputs, targets = torch.randn(16, 32), torch.randn(16, 32)
    parts = zip(inputs.chunk(4), targets.chunk(4), strict=True)
    expected = sum(loss_fn(model(x), y).item() for x, y in parts) / 4
    pipe = pl.Pipeline(model, found, loss_fn=loss_fn)
    assert float(pipe.step(inputs, targets)) == pytest.approx(expected, rel=1e-6)


def test_several_plans_are_found_best_first():
    options = {"cluster": "dgx-a100-80", "devices": 2, "global_batch_size": 16, "num_rounds": 1}
    found = pl.plans(layers(), EXAMPLE, loss_fn=loss_fn, fix="pipeline=2,data=1", top=3, **options)
    assert len({(plan.schedule, plan.virtual_stages, plan.microbatches) for plan in found}) == 3
    assert sorted(found, key=lambda plan: plan.predicted_step_seconds) == found
    with pytest.raises(InputError, match=r"top=0: must be at least 1\."):
        pl.plans(layers(), EXAMPLE, loss_fn=loss_fn, top=0, **options)


class Residual(nn.Module):
    """A model whose order of layers only its forward knows."""

    def __init__(self, count: int = 6, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        start = x = self.first(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.last(x) + start


def test_a_traced_model_is_planned_and_runs():
    torch.manual_seed(0)
    model, reference = Residual(), Residual()
    reference.load_state_dict(model.state_dict())
    found = pl.plan(
        model, EXAMPLE, loss_fn=loss_fn, cluster="dgx-a100-80", devices=2, global_batch_size=16,
        fix="pipeline=2,microbatch_size=4,schedule=1f1b", num_rounds=1,
    )  # fmt: skip
    assert found.cut[0] in dict(model.named_modules())
    assert pl.Plan.from_json(found.to_json()) == found
    assert set(found.recompute) == {"none"}
    inputs, targets = torch.randn(16, 32), torch.randn(16, 32)
    expected = loss_fn(reference(inputs), targets)
    expected.backward()
    pipe = pl.Pipeline(model, found, loss_fn=loss_fn, example=EXAMPLE[0])
    assert float(pipe.step(inputs, targets)) == pytest.approx(expected.item(), rel=1e-6)
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_calls_of_a_traced_model():
    rows = measure_calls(Residual(), EXAMPLE, num_stages=2, loss_fn=loss_fn, num_rounds=1)
    named = {row.name: row for row in rows if row.counted}
    assert {f"blocks.{n}" for n in range(6)} <= named.keys()
    for samples, row in named["blocks.2"].rows.items():
        assert row.sent == 3 * 4 * samples * 32  # the output, its input and the value that skips
    held = {name: shape for row in rows for name, shape in row.parameters.items()}
    assert held == {name: tuple(parameter.shape) for name, parameter in Residual().named_parameters()}
    assert sorted(rows[0].rows) == [4, 8]


def test_what_is_measured_of_a_layer():
    width, rows = 32, measure_layers(layers(2, 32), torch.zeros(8, 32), num_rounds=1)
    first = rows[0]
    assert sorted(first.rows) == [4, 8]
    assert sum(a * b for a, b in (shape for shape in first.parameters.values() if len(shape) == 2)) == width * width
    for samples, row in first.rows.items():
        number = 4 * samples * width
        assert (row.received, row.sent) == (number, number)
        assert row.kept == 2 * number  # the input of each of its modules
        assert row.forward > 0


def test_halves_of_backwards_are_measured_but_of_layers_with_hooks():
    model = layers(2, 32)
    calls: list[int] = []
    model[1][0].weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    first, second = measure_layers(model, torch.zeros(8, 32), num_rounds=1, split=_input_backward)
    for samples in (4, 8):
        assert first.rows[samples].inputs + first.rows[samples].weights > 0
        row = second.rows[samples]
        assert row.inputs == row.weights == row.backward / 2
    assert not calls
    assert all(parameter.grad is None for parameter in model.parameters())


class Repeated(nn.Linear):
    """A layer that takes `times` as long as its parameters and bytes tell."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__(width, width)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = super().forward(x)
        return x


def test_equal_layers_have_equal_times(monkeypatch):
    """Noise of a few percent would make cuts uneven; a layer that takes far longer is another one."""
    seconds = [1.0, 1.1, 0.95, 3.0, 1.2, 2.0]

    def noisy(modules, inputs, **_):
        size = tree_leaves(inputs)[0].nbytes
        return [LayerTime("", each, 2 * each, size, 64, size) for each in seconds[: len(modules)]]

    monkeypatch.setattr("pipeloom.split.layer_rows.profile_layers", noisy)
    model = nn.Sequential(*(Repeated(8, times) for times in (1, 1, 1, 3, 1)), nn.Linear(8, 8))
    rows = [each.rows[4] for each in measure_layers(model, torch.zeros(4, 8))]
    assert [row.forward for row in rows] == [1.1, 1.1, 1.1, 3.0, 1.1, 2.0]
    assert [row.backward for row in rows] == [2.2, 2.2, 2.2, 6.0, 2.2, 4.0]
    rows = [each.rows[4] for each in measure_layers(model[:5], (torch.zeros(4, 8),) * 2, loss_fn=loss_fn)]
    assert [row.forward for row in rows] == pytest.approx([1.05, 1.05, 1.05, 3.0, 1.2])  # the last with the loss


def test_less_memory_recomputes_or_shards_more():
    roomy, tight = (
        pl.plan(layers(6, 64), torch.zeros(1024, 64), cluster="dgx-a100-80", devices=2, global_batch_size=1024,
             memory_bytes=memory, fix="pipeline=1,microbatch_size=512", num_rounds=1)
        for memory in (1e9, 1.5e6)
    )  # fmt: skip
    assert max(tight.predicted_memory_bytes) <= 1.5e6 < max(roomy.predicted_memory_bytes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_bytes": 1e3}, "no plan fits"),
        ({"fix": "tensor=2"}, "tensor needs times of parts of layers"),
        ({"cluster": "dgx-b900"}, "cluster=dgx-b900"),
        ({"global_batch_size": 0}, "global_batch_size=0: must be at least 1"),
        ({"global_batch_size": 8.5}, "global_batch_size=8.5: must be an integer"),
        ({"devices": 2**40}, "devices=1099511627776: must be at most 1,048,576"),
        ({"num_rounds": 0}, "num_rounds=0: must be at least 1"),
        ({"memory_bytes": float("nan")}, "memory_bytes=nan: must be a number of bytes above 0"),
        ({"memory_bytes": "1GiB"}, "memory_bytes='1GiB': must be a number of bytes above 0"),
        ({"optimizer": "adamax"}, "optimizer='adamax': must be one of sgd, "),
        ({"objective": "speed"}, "objective='speed': must be one of time, memory, cost"),
        ({"fix": "data=1", "forbid": "data"}, "forbid=data: data is in fix too"),
        ({"fix": "offload=0", "cluster": NO_HOST}, "offload: cluster dgx-a100-80 has no known bandwidth"),
        ({"loss_fn": nn.functional.mse_loss}, "example: with loss_fn, it must be the pair (inputs, targets)"),
        ({"cluster": 5}, "cluster=5: must be a name such as 'dgx-h100', or a cluster file."),
        ({"fix": ["data=1"]}, "fix=['data=1']: must be a dict, or text such as 'pipeline=4,schedule=1f1b'."),
        ({"forbid": 5}, "forbid=5: must be a list of keys, or text such as 'offload,recompute'."),
        ({"forbid": ["speed"]}, "forbid=speed: 'speed' cannot be forbidden"),
        ({"fix": {"data": 3}}, "Change devices or fix."),
    ],
)
def test_what_cannot_be_planned_is_one_line(options, said):
    given = {"cluster": "dgx-a100-80", "devices": 2, "global_batch_size": 8, "num_rounds": 1, **options}
    with pytest.raises(InputError) as error:
        pl.plan(layers(2), torch.zeros(4, 32), **given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("example", "loss_fn", "said"),
    [
        ((torch.zeros(0, 32), torch.zeros(0, 32)), nn.functional.mse_loss, "example: has 0 samples"),
        ((torch.zeros(4, 32), torch.zeros(4, 32)), "mse", "loss_fn='mse': must be a function"),
        ((torch.zeros(4, 32), torch.zeros(4, 32)), lambda *_: None, "loss_fn returned None: must be the loss as a"),
        ((torch.zeros(4, 32), torch.zeros(4, 32)), torch.sub, "loss_fn returned a tensor of shape (2, 32)"),
    ],
)
def test_a_loss_that_is_none_is_one_line(example, loss_fn, said):
    with pytest.raises(InputError) as error:
        pl.plan(layers(2), example, cluster=DGX, devices=2, global_batch_size=8, loss_fn=loss_fn, num_rounds=1)
    assert said in str(error.value)


def test_a_plan_leaves_random_numbers_as_they_are():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)) for _ in range(2)])
    example = torch.zeros(4, 32)
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    pl.plan(model, example, cluster=DGX, devices=2, global_batch_size=8, num_rounds=1)
    assert torch.equal(torch.rand(4), expected)


def test_plans_to_compare_are_a_list_of_plans():
    with pytest.raises(InputError, match=r"fastest_plan got 'ab'\. Pass a list of plans"):
        pl.fastest_plan("ab", lambda _: None, lambda _: None)


def test_a_model_in_another_number_format_is_one_line():
    with pytest.raises(InputError) as error:
        pl.plan(layers(2).double(), torch.zeros(4, 32, dtype=torch.float64), cluster=DGX, global_batch_size=8)
    assert str(error.value) == (
        "model has parameters of torch.float64: a plan trains in one number format, of torch.float32, torch.bfloat16, "
        "torch.float16. Convert the model, such as by model.float()."
    )


def test_a_list_of_keys_can_be_forbidden():
    options = {"cluster": DGX, "devices": 2, "global_batch_size": 8, "num_rounds": 1}
    found = pl.plan(layers(), torch.zeros(4, 32), forbid=["data", "recompute"], **options)
    assert (found.pipeline, found.data, set(found.recompute)) == (2, 1, {"none"})


def test_values_of_python_can_be_fixed():
    fix = {
        "pipeline": 2, "recompute": ["full", "none"], "blocks": (3, 1), "offload": None, "offload_states": False,
        "tensor": 1,
    }  # fmt: skip
    found = pl.plan(
        layers(), torch.zeros(4, 32), cluster="dgx-a100-80", devices=2, global_batch_size=8, num_rounds=1, fix=fix
    )
    assert (found.pipeline, found.cut, found.recompute) == (2, (3, 1), ("full", "none"))
