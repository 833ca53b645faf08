"""What a new user runs into: the model stays theirs, and what does not fit is refused in one line."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError, PipeloomError, RunError, SplitError, StageError
from pipeloom.split import split
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import accumulate, language_loss, make_gpt, make_mlp, tokens

mse = nn.functional.mse_loss


def _schedule(name: str = "1f1b", num_ranks: int = 2, num_microbatches: int = 4) -> pl.Schedule:
    return pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)


def _batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 8, generator=generator), torch.randn(samples, 8, generator=generator)


def _one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize("frozen", ["", "0", "01"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_loss_that_trains_nothing_is_refused_where_something_wants_to(name: str, frozen: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for index in frozen:
        model[int(index)].requires_grad_(False)
    with pl.Pipeline(model, _schedule(name), loss_fn=lambda output, target: mse(output, target).detach()) as pipe:
        pipe.evaluate(*_batch())
        if frozen == "01":
            assert float(pipe.step(*_batch())) > 0
            return
        with pytest.raises(RunError, match=r"stage 1.*1F0.*the loss requires no gradient, but parameters do") as error:
            pipe.step(*_batch())
        _one_line(error.value)


def test_a_loss_for_every_sample_is_refused() -> None:
    with (
        pl.Pipeline(
            nn.Linear(8, 8), _schedule("gpipe", 1), loss_fn=lambda output, target: (output - target).mean(1)
        ) as pipe,
        pytest.raises(RunError, match=r"loss_fn returned \(\d,\): it must return a scalar") as error,
    ):
        pipe.step(*_batch())
    _one_line(error.value)


# The model


def _state(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
@pytest.mark.parametrize("transport", ["loopback", "threads"])
def test_a_pipeline_leaves_the_model_as_it_is(name: str, transport: str) -> None:
    inputs, targets = tokens(8)
    reference, model = make_gpt(tied=True), make_gpt(tied=True)
    before, modules = _state(model), list(model.modules())
    for step in range(2):  # a second pipeline over the same model finds it tied
        accumulate(reference, language_loss, inputs, targets, 4)
        with pl.Pipeline(model, _schedule(name), loss_fn=language_loss, transport=transport) as pipe:
            assert set(map(id, model.parameters())) <= set(map(id, pipe.parameters()))
            pipe.step(inputs, targets)
        assert _state(model) == before
        assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
        expected = dict(reference.named_parameters())
        for parameter_name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[parameter_name].grad, msg=f"{parameter_name} {step}")


class _Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("not\nthis one")


def test_a_module_with_a_tied_parameter_is_copied_with_all_that_refers_to_it() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.mean = nn.BatchNorm1d(8)
            self.also = [self.linear]  # seen by no state dict

        def forward(self, x):
            return self.mean(self.also[0](x))

    head, calls = Head(), []
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), head)
    model[0].weight = head.linear.weight
    head.register_forward_hook(lambda *_: calls.append(1))
    with pl.Pipeline(model, _schedule(), loss_fn=mse, cut=[2, 1]) as pipe:
        pipe.step(*_batch())
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        optimizer.step()
        pipe.step(*_batch())
    assert model[0].weight is head.linear.weight
    assert len(calls) == 8
    assert head.mean.num_batches_tracked == 8  # what is not tied is the model's own
    model[2] = _Uncopied(8, 8)
    model[2].weight = model[0].weight
    with pytest.raises(InputError, match=r"_Uncopied|StageModule.*cannot be copied \(not this one\)") as error:
        pl.Pipeline(model, _schedule(), loss_fn=mse, cut=[2, 1])
    _one_line(error.value)
    assert model[2].weight is model[0].weight


def test_copies_that_an_optimizer_does_not_know_are_noticed() -> None:
    model = make_gpt(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Pipeline(model, _schedule(), loss_fn=language_loss) as pipe:
        pipe.step(*tokens(8))
        optimizer.step()
        with pytest.raises(InputError, match=r"'embedding\.weight' differs on ranks 0 and 1.*parameters\(\)") as error:
            pipe.step(*tokens(8))
        _one_line(error.value)
        pipe.load_state_dict(model.state_dict())
        pipe.step(*tokens(8))
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.fill_(torch.nan)
        pipe.step(*tokens(8))  # not a number, but the same


@pytest.mark.parametrize("change", ["type", "shape"])
def test_a_tied_parameter_that_is_changed_afterwards_is_one_line(change: str) -> None:
    """As `model.float()` and `model.resize_token_embeddings()` do: the copy on another stage is not the model's."""
    model = make_gpt(tied=True)
    with pl.Pipeline(model, _schedule(), loss_fn=language_loss) as pipe:
        pipe.step(*tokens(8))
        if change == "type":
            model.bfloat16()
        else:
            weight = dict(model.named_parameters())["embedding.weight"]
            weight.data = torch.cat([weight.data, weight.data])
        with pytest.raises(InputError, match=r"is a torch\..* on rank 0, a torch\..* on rank 1: a model must") as error:
            pipe.step(*tokens(8))
        _one_line(error.value)


def _other_values(rank: int) -> str:
    model = make_gpt(tied=True)
    if rank:
        nn.init.normal_(model.embedding.weight, std=0.02)
    with pl.Pipeline(model, _schedule(), loss_fn=language_loss) as pipe, pytest.raises(RunError) as error:
        pipe.step(*tokens(8))
    return _one_line(error.value)


def test_processes_with_other_values_are_noticed() -> None:
    messages = run_ranks(_other_values, 2)
    assert any("parameter 'embedding.weight' is not the same" in message for message in messages)


# State


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_state_dicts_are_those_of_the_model(name: str) -> None:
    trained, model = make_gpt(tied=True), make_gpt(tied=True)
    nn.init.normal_(trained.embedding.weight)
    with pl.Pipeline(model, _schedule(name), loss_fn=language_loss) as pipe:
        assert pipe.state_dict().keys() == model.state_dict().keys()
        pipe.load_state_dict(trained.state_dict())
        pipe.step(*tokens(8))
        assert all(torch.equal(trained.state_dict()[key], value) for key, value in pipe.state_dict().items())
        model.load_state_dict(pipe.state_dict())
        state = trained.state_dict()
        del state["head.weight"]  # tied: one name is enough
        pipe.load_state_dict(state)
        before = {key: value.clone() for key, value in pipe.state_dict().items()}
        for change, said in [
            ({"head.weight": torch.zeros(32, 16)}, "different values"),
            (
                {"blocks.9.weight": torch.zeros(1)},
                "'blocks.9.weight': the model does not have it. Pass this",
            ),
            (
                {"embedding.weight": torch.zeros(3, 16)},
                r"shape \(3, 16\) in the state: the model's has shape \(32, 16\)",
            ),
            ({"embedding.weight": 3}, "has type int in the state"),
        ]:
            with pytest.raises(InputError, match=said) as error:
                pipe.load_state_dict(state | change)
            _one_line(error.value)
        del state["embedding.weight"]
        with pytest.raises(InputError, match=r"no 'embedding\.weight'"):
            pipe.load_state_dict(state)
        assert all(torch.equal(before[key], value) for key, value in pipe.state_dict().items())


def _state_of_rank(rank: int) -> list[str]:
    model = make_gpt(tied=True)
    with pl.Pipeline(make_gpt(tied=True), _schedule(), loss_fn=language_loss) as pipe:
        pipe.load_state_dict(model.state_dict())  # of the whole model
        return list(pipe.state_dict())


def test_processes_hold_parts_of_the_state() -> None:
    first, second = run_ranks(_state_of_rank, 2)
    assert {*first, *second} == make_gpt(tied=True).state_dict().keys()
    assert not {*first} & {*second}


# Batches


def _other_batches(rank: int, num_ranks: int, name: str) -> str:
    with pl.Pipeline(make_mlp(), _schedule(name, num_ranks), loss_fn=mse) as pipe:
        for samples in (8, 5, 9):
            pipe.step(_batch(samples)[0], _batch(samples)[1])
            pipe.forward(_batch(samples)[0])
        inputs, targets = (_batch(12 if rank == 0 else 4)) if pipe.needs_inputs else (None, _batch(4)[1])
        with pytest.raises(PipeloomError) as error:
            pipe.step(inputs, targets)
    return _one_line(error.value)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_targets_of_another_length_are_refused_by_the_last_rank(num_ranks: int) -> None:
    messages = run_ranks(_other_batches, num_ranks, num_ranks, "1f1b")
    assert "inputs have 12 samples and targets 4: every sample needs a target. Pass inputs" in messages[-1]


def test_ranks_that_read_different_batches_are_refused() -> None:
    messages = run_ranks(_other_batches, 2, 2, "chimera")  # the first that notices says so, and ends the other
    assert any("samples and this rank one of" in message for message in messages)


def _other_schedules(rank: int, what: str) -> str:
    schedule = _schedule(num_ranks=2 + (what == "ranks") * rank, num_microbatches=4 + (what == "sizes") * rank)
    if what == "orders" and rank:
        schedule = pl.schedules.from_orders(_schedule("gpipe").orders, name="1f1b")
    with pytest.raises(InputError) as error:
        pl.Pipeline(make_mlp(), schedule, loss_fn=mse, cut=[4, 2] if what == "cuts" and rank else "layers")
    return _one_line(error.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "sizes",
            "rank 0 has schedule '1f1b' of 2 ranks, 2 stages, 4 micro-batches and rank 1 '1f1b' of 2 ranks, 2",
        ),
        (
            "ranks",
            "rank 0 has schedule '1f1b' of 2 ranks, 2 stages, 4 micro-batches and rank 1 '1f1b' of 3 ranks, 3",
        ),
        ("orders", "micro-batches, but differ in the orders of the schedule: all ranks must run the same program"),
        ("cuts", "micro-batches, but differ in the layers of the stages: all ranks must run the same program"),
    ],
)
def test_processes_agree_on_what_they_run(what: str, said: str) -> None:
    first, second = run_ranks(_other_schedules, 2, what)
    assert first == second
    assert said in first


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_a_step_ends_at_its_batch(name: str) -> None:
    inputs, targets = _batch()
    leaf, expected = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    with pl.Pipeline(make_mlp(), _schedule(name), loss_fn=mse) as pipe:
        for batch in ((leaf.tanh(), targets), (inputs, leaf.tanh()), ({"x": leaf * 2}, targets)):
            with pytest.raises(InputError, match=r"require gradients.*detach\(\)") as error:
                pipe.step(*batch)
            _one_line(error.value)
        pipe.evaluate(leaf.tanh(), targets)
        pipe.step(leaf, targets)  # a leaf may want its gradient, and gets it
        pipe.step(inputs, targets)
    accumulate(make_mlp(), mse, expected, targets, 4)
    torch.testing.assert_close(leaf.grad, expected.grad)


@pytest.mark.parametrize(
    ("make_inputs", "said"),
    [
        (lambda: np.zeros((8, 8)), "inputs hold a value of type ndarray: must be dense tensors, None"),
        (
            lambda: {(0, 1): torch.zeros(8, 8)},
            r"inputs hold a dict with key \(0, 1\): keys must be str or int\. Rename",
        ),
        (
            lambda: torch.zeros(8, 8).to_sparse(),
            r"inputs hold a value of type torch\.sparse_coo tensor: .*a dense tensor",
        ),
        (lambda: torch.zeros(0, 8), "inputs hold 0 samples: every micro-batch needs at least one. Skip empty"),
        (
            lambda: torch.tensor(1.0),
            r"inputs hold a tensor without dimensions: .* samples along dimension 0\. Reshape",
        ),
        (lambda: {"x": torch.zeros(8, 8), "y": torch.tensor(1)}, "inputs hold a tensor without dimensions"),
        (lambda: [1.0, 2.0], "inputs hold no tensor: a batch needs a tensor"),
    ],
)
def test_batches_that_are_none(make_inputs: Callable[[], object], said: str) -> None:
    with (
        pl.Pipeline(make_mlp(), _schedule(), loss_fn=mse) as pipe,
        pytest.raises(InputError, match=said) as error,
    ):
        pipe.step(make_inputs(), torch.zeros(8, 8))
    _one_line(error.value)


# Arguments


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pl.Pipeline(make_mlp(), "1f1b", loss_fn=mse), "schedule='1f1b': must be.*schedules.build"),
        (lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn="mse"), "loss_fn='mse': must be a function"),
        (
            lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn=mse, recompute=["full"]),
            r"recompute=\['full'\]: a list needs one value per stage.*Pass the string 'full' for all stages",
        ),
        (
            lambda: pl.Pipeline(nn.Sequential, _schedule(), loss_fn=mse),
            r"model=Sequential: .* not a class.*Create an instance",
        ),
        (lambda: pl.Pipeline(None, _schedule(), loss_fn=mse), "model=None: must be an nn.Module, or a list"),
        (lambda: pl.Pipeline("gpt2", _schedule(), loss_fn=mse), "model='gpt2': must be an nn.Module, or a list"),
        (
            lambda: pl.Pipeline(make_mlp().state_dict(), _schedule(), loss_fn=mse),
            "model is a OrderedDict: must be an",
        ),
        (lambda: pl.Pipeline(3, _schedule(), loss_fn=mse), "model=3: must be an nn.Module, or a list"),
        (lambda: pl.Pipeline([nn.Linear, nn.Linear], _schedule(), loss_fn=mse), r"model\[0\]=Linear: .* not a class"),
        (
            lambda: pl.Pipeline([nn.Linear(8, 8), None], _schedule(), loss_fn=mse),
            r"model\[1\] is None: must be an nn.Module",
        ),
        (
            lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn=nn.MSELoss),
            r"loss_fn=MSELoss: is a class, and must be a function or an instance. Pass MSELoss\(\)",
        ),
        (lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn=mse, cut="x"), "cut='x': must be 'layers'"),
        (
            lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn=mse, cut=[1.5, 2]),
            r"cut=\[1.5, 2\]: must be .*integers",
        ),
        (
            lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn=mse, layers=3),
            "layers=3: must be a list of module names",
        ),
        (
            lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn=mse, layers=[1]),
            r"layers=\[1\]: must be a list of module names",
        ),
        (lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn=mse, transport=3), "transport=3: must be one of auto"),
        (
            lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn=mse, offload="cpu"),
            "offload='cpu': .*OffloadActiv",
        ),
        (lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn=mse, mesh=2), "mesh=2: must be a pipeloom.Mesh"),
        (
            lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn=mse, timeout_seconds="10"),
            "timeout_seconds='10': must",
        ),
        (lambda: pl.Pipeline(make_mlp(), _schedule(), loss_fn=mse, timeout_seconds=0), "timeout_seconds=0: .*above"),
        (lambda: split(make_mlp(), "2"), "num_stages='2': must be an integer >= 1"),
        (lambda: pl.schedules.one_f_one_b(num_ranks="2", num_microbatches=4), "'2' ranks"),
        (lambda: pl.schedules.zb_v(num_ranks=2, num_microbatches=2.5), "2.5 micro-batches"),
        (lambda: _schedule(num_microbatches=2.5), "2.5 micro-batches"),
        (lambda: pl.schedules.interleaved(num_ranks=2, num_microbatches=4, num_chunks=0), "0 chunks"),
        (lambda: split(nn.Sequential(), 1), "Sequential is empty"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_arguments_of_the_wrong_kind(make: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        make()
    _one_line(error.value)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("emb", r"Add \['blocks\.0', .*\] to layers and move 'scale' into a submodule"),
        (["emb", "blocks.*"], "'scale' would be in no stage: .*Move 'scale' into"),
        (["emb", "emb"], "layer 'emb' is listed twice, by 'emb' and 'emb'"),
        (["emb", "blocks.*", "blocks.2"], r"layer 'blocks\.2' is listed twice, by 'blocks\.\*' and 'blocks\.2'"),
    ],
)
def test_layers_that_do_not_fit(layers, said: str) -> None:
    with pytest.raises(SplitError, match=said) as error:
        split(_Net(), 1, layers=layers)
    _one_line(error.value)


# While it runs


class _Calls(nn.Module):
    """Runs `function` in its forward."""

    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize("transport", ["loopback", "threads"])
def test_a_pipeline_is_not_called_from_within(transport: str) -> None:
    pipes = []
    model = nn.Sequential(nn.Linear(8, 8), _Calls(lambda x: pipes[0].evaluate(x, x)))
    with pl.Pipeline(model, _schedule(), loss_fn=mse, transport=transport) as pipe:
        pipes.append(pipe)
        with pytest.raises(StageError, match="a stage or the loss called its own Pipeline") as error:
            pipe.step(*_batch())
    _one_line(error.value)


def test_a_cause_of_several_lines_is_told_in_one() -> None:
    def fail(x):
        raise ValueError("one\n  two\n")

    with (
        pl.Pipeline([_Calls(fail), nn.Linear(8, 8)], _schedule(), loss_fn=mse) as pipe,
        pytest.raises(StageError, match="ValueError: one two") as error,
    ):
        pipe.step(*_batch())
    _one_line(error.value)


def _sparse(rank: int | None) -> str:
    model = [_Calls(lambda x: x.to_sparse()), _Calls(lambda x: x)]
    with pl.Pipeline(model, _schedule(), loss_fn=mse) as pipe, pytest.raises(PipeloomError) as error:
        pipe.step(*_batch())
    return _one_line(error.value)


def test_sparse_tensors_are_refused_everywhere() -> None:
    said = "InputError: a stage returned a value of type torch.sparse_coo tensor: must be dense tensors"
    assert said in _sparse(None)
    assert said in run_ranks(_sparse, 2)[0]
