"""I and W against B: on modules of every kind, what is kept in between, and in whole schedules."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pipeloom.autograd import use_fp8
from pipeloom.autograd.split_backward import backward_input
from pipeloom.models import GPTConfig
from pipeloom.models.gpt import Block

B, S, D, V = 3, 5, 8, 11


class Fn(nn.Module):
    """A module from its parameters and a function of them."""

    def __init__(self, function: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, *inputs):
        return self.function(*inputs, **dict(self.named_parameters()))


class Square(torch.autograd.Function):
    """x * x @ w with a backward that counts its calls and yields both gradients, whoever asks."""

    calls = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x * x) @ w

    @staticmethod
    def backward(ctx, gradient):
        Square.calls += 1
        x, w = ctx.saved_tensors
        return 2 * x * (gradient @ w.t()), ((x * x).flatten(0, -2)).t() @ gradient.flatten(0, -2)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *inputs):
        def run(*values):
            self.calls += 1
            return self.inner(*values)

        return checkpoint(run, *inputs, use_reentrant=False)


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def mlp(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 2 * D, bias=bias), nn.GELU(), nn.Linear(2 * D, D, bias=bias))


def gpt_block() -> nn.Module:
    block = Block(GPTConfig(width=D, heads=2, sequence_length=S))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    block.rotary.reset_buffers()
    return block


def partly_frozen() -> nn.Module:
    model = nn.Sequential(mlp(), nn.LayerNorm(D), mlp())
    for parameter in (model[0][0].weight, model[0][2].bias, model[1].weight, *model[2].parameters()):
        parameter.requires_grad_(False)
    return model


def written(x: Tensor, w: Tensor) -> Tensor:
    """In-place operations on a result, on a view of it, and on a copy."""
    y = F.linear(x, w)
    y[..., 0].mul_(2)
    z = y.relu_() + x
    z[:, 1:3] = F.linear(x[:, 1:3], w) * 2
    return z.add_(1)


def grouped(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)


def eight_bits(module: nn.Module) -> nn.Module:
    assert use_fp8(module)
    return module


def chunked(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = w.chunk(3)
    return F.linear(x, q) * F.linear(x, k) + x @ v.t()


def lstm() -> nn.Module:
    class First(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    return First(D, D, batch_first=True)


def attention() -> nn.Module:
    class Self(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x, need_weights=False)[0]

    return Self(D, 2, batch_first=True)


STATES = ((B, S, D),)
WIDE = ((B, 16, 16),)
IMAGE = ((B, 4, 6, 6),)
SQUARE = {"w": (D, D)}
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "linear": (lambda: nn.Linear(D, D), STATES),
    "linear of a matrix": (lambda: nn.Linear(D, D), ((S, D),)),
    "linear of a vector": (lambda: nn.Linear(D, D), ((D,),)),
    "mlp": (mlp, STATES),
    "mlp without bias": (lambda: mlp(bias=False), STATES),
    "GPT block": (gpt_block, STATES),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.3, batch_first=True), STATES),
    "attention": (attention, STATES),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(D), nn.RMSNorm(D), nn.GroupNorm(1, S)), STATES),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), IMAGE),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2, bias=False)),
        IMAGE,
    ),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1), IMAGE),
    "convolution of a sequence": (lambda: nn.Conv1d(S, 4, 3, dilation=2), STATES),
    "lstm": (lstm, STATES),
    "weights on the left": (lambda: Fn(lambda x, w: w @ x.flatten(0, 1).t(), **SQUARE), STATES),
    "addmm": (lambda: Fn(lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=3), w=(D, 4), b=(4,)), ((S, D),)),
    "addmm of both": (lambda: Fn(lambda x, v, w: torch.addmm(x, v, w, alpha=2), v=(S, 4), w=(4, D)), ((S, D),)),
    "products of 8 bits": (lambda: eight_bits(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))), WIDE),
    "experts": (lambda: Fn(grouped, w=(S, D, 4)), STATES),
    "einsum": (lambda: Fn(lambda x, w: torch.einsum("bsd,hde->bhse", x, w), w=(2, D, 4)), STATES),
    "low rank": (lambda: Fn(lambda x, w, a, b: x @ (w + b @ a).t(), w=(4, D), a=(2, D), b=(4, 2)), STATES),
    "used thrice in a row": (lambda: Fn(lambda x, w: ((x @ w).tanh() @ w).tanh() @ w, **SQUARE), STATES),
    "used thrice abreast": (
        lambda: Fn(lambda x, w, b: torch.cat([F.linear(x * k, w, b) for k in (1, 2, 3)]), b=(D,), **SQUARE),
        STATES,
    ),
    "used both ways": (lambda: Fn(lambda x, w: (x @ w).tanh() @ w.t(), **SQUARE), STATES),
    "cut into chunks": (lambda: Fn(chunked, w=(3 * D, D)), STATES),
    "in a product and elsewhere": (lambda: Fn(lambda x, w: x @ w + w.sum(0), **SQUARE), STATES),
    "added": (lambda: Fn(lambda x, p: x + p[:S], p=(2 * S, D)), STATES),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(D, D)), STATES),
    "in place": (lambda: Fn(written, **SQUARE), STATES),
    "partly frozen": (partly_frozen, STATES),
    "frozen": (lambda: mlp().requires_grad_(False), STATES),
    "unused parameter": (lambda: Fn(lambda x, w, v: x @ w, v=(2,), **SQUARE), STATES),
    "no parameter": (nn.GELU, STATES),
    "identity": (nn.Identity, STATES),
    "several outputs": (lambda: Fn(lambda x, w: (x @ w, (x @ w).argmax(-1), x.sum() + w.sum()), **SQUARE), STATES),
    "views of one result": (lambda: Fn(lambda x, w: (x @ w).unbind(1), **SQUARE), STATES),
    "several inputs": (lambda: Fn(lambda x, y, w: (x @ w) * y, **SQUARE), STATES * 2),
    "an input without use": (lambda: Fn(lambda x, y, w: x @ w, **SQUARE), STATES * 2),
    "custom function": (lambda: Fn(lambda x, w: Square.apply(x.tanh(), w), **SQUARE), STATES),
    "checkpointed": (lambda: nn.Sequential(Checkpointed(Residual(*mlp())), Checkpointed(gpt_block())), STATES),
    "checkpoints in a checkpoint": (
        lambda: Checkpointed(nn.Sequential(Checkpointed(mlp()), Checkpointed(mlp()))),
        STATES,
    ),
    "checkpoint with dropout": (lambda: Checkpointed(nn.Sequential(mlp(), nn.Dropout(0.5), mlp())), STATES),
    "checkpointed custom function": (lambda: Checkpointed(Fn(Square.apply, **SQUARE)), STATES),
    "checkpointed convolution": (lambda: Checkpointed(nn.Conv2d(4, 4, 3)), IMAGE),
    "embedding and head tied": (
        lambda: Fn(lambda t, w: F.linear(F.embedding(t, w).tanh(), w), w=(V, D)),
        ("tokens",),
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(V, D, padding_idx=2), *mlp()), ("tokens",)),
    "embedding by frequency": (lambda: nn.Embedding(V, D, scale_grad_by_freq=True), ("tokens",)),
    "sparse embedding": (lambda: nn.Embedding(V, D, sparse=True), ("tokens",)),
    "checkpointed embedding": (lambda: Checkpointed(nn.Sequential(nn.Embedding(V, D), *mlp())), ("tokens",)),
    "first stage of numbers": (lambda: nn.Sequential(Checkpointed(mlp()), mlp()), ("data",)),
}
# Where one call yields several gradients in B, and fewer in I or W, the last bits may differ.
CLOSE = {
    "convolutions",
    "transposed convolution",
    "convolution of a sequence",
    "batch norm",
    "checkpointed convolution",
}


def make_inputs(kinds: tuple[Any, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for kind in kinds:
        if kind == "tokens":
            inputs.append(torch.randint(V, (B, S), generator=generator))
        else:
            shape = (B, S, D) if kind == "data" else kind
            inputs.append(torch.randn(shape, generator=generator).requires_grad_(kind != "data"))
    return inputs


def run_forward(module: nn.Module, inputs: list[Tensor], seed: int) -> tuple[list[Any], list[Tensor]]:
    """Roots of the graph, as a pipeline holds them, and a gradient for each."""
    torch.manual_seed(seed)
    output = module(*inputs)
    outputs = [y for y in (output if isinstance(output, tuple) else (output,)) if y.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs]
    return [y if y.grad_fn is None else get_gradient_edge(y) for y in outputs], gradients


def by_full_backwards(module: nn.Module, batches: list[list[Tensor]]) -> list[list[Tensor | None]]:
    for seed, inputs in enumerate(batches):
        roots, gradients = run_forward(module, inputs, seed)
        if roots:
            torch.autograd.backward(roots, gradients)
    return [[x.grad for x in inputs if x.requires_grad] for inputs in batches]


def by_split_backwards(module: nn.Module, batches: list[list[Tensor]]) -> list[list[Tensor | None]]:
    """All forwards, all I, all W; no I touches a gradient."""
    graphs = [run_forward(module, inputs, seed) for seed, inputs in enumerate(batches)]
    found, left = [], []
    for inputs in batches:
        roots, gradients = graphs.pop(0)
        before = {name: p.grad for name, p in module.named_parameters()}
        gradient, rest = backward_input(roots, gradients, [x for x in inputs if x.requires_grad])
        assert all(p.grad is before[name] is None for name, p in module.named_parameters())
        assert all(x.grad is None for x in inputs)
        found.append(gradient)
        left.append(rest)
    for rest in left:
        rest.accumulate()
    return found


def assert_same(actual: Tensor | None, expected: Tensor | None, name: str, *, close: bool = False) -> None:
    assert (actual is None) == (expected is None), name
    if actual is not None and close:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    elif actual is not None:
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.to_dense(), expected.to_dense()), name


def compare(build: Callable[[], nn.Module], kinds: tuple[Any, ...], *, close: bool = False) -> nn.Module:
    """I and W against B on three micro-batches."""
    torch.manual_seed(0)
    reference = build()
    module = copy.deepcopy(reference)
    expected = by_full_backwards(reference, [make_inputs(kinds, seed) for seed in range(3)])
    actual = by_split_backwards(module, [make_inputs(kinds, seed) for seed in range(3)])
    for mine, theirs in zip(actual, expected, strict=True):
        for k, (a, e) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(a, e, f"input {k}", close=close)
    others = dict(reference.named_parameters())
    for name, parameter in module.named_parameters():
        assert_same(parameter.grad, others[name].grad, name, close=close)
    buffers = dict(reference.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in module.named_buffers())
    return module


@pytest.fixture
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_b(name: str) -> None:
    build, kinds = MODULES[name]
    compare(build, kinds, close=name in CLOSE)


@pytest.mark.parametrize("name", ["mlp", "GPT block", "encoder layer", "checkpointed", "embedding and head tied"])
def test_in_single_precision(name: str) -> None:
    compare(*MODULES[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_other_types(dtype: torch.dtype) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D, bias=False)).to(dtype)

        def forward(self, x):
            return self.inner(x.to(dtype))

    compare(Cast, STATES)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast(checkpointing: bool) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Checkpointed(gpt_block()) if checkpointing else gpt_block()

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x)

    compare(Cast, STATES)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks(checkpointing: bool) -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.compile(mlp(), backend="aot_eager")
            self.second = torch.compile(gpt_block(), backend="aot_eager")
            self.between = nn.Linear(D, D)
            if checkpointing:
                self.second = Checkpointed(self.second)

        def forward(self, x):
            return self.second(self.between(self.first(x)))

    compare(Compiled, STATES)
    torch.compiler.reset()


def test_a_custom_function_runs_backward_once() -> None:
    Square.calls = 0
    by_split_backwards(*_one_batch("custom function"))
    assert Square.calls == 1


def _one_batch(name: str) -> tuple[nn.Module, list[list[Tensor]]]:
    build, kinds = MODULES[name]
    torch.manual_seed(0)
    return build(), [make_inputs(kinds, 0)]


@pytest.mark.parametrize(
    "name", ["checkpointed", "checkpoint with dropout", "checkpointed custom function", "checkpointed convolution"]
)
def test_a_checkpoint_recomputes_once_and_in_i(name: str) -> None:
    module, (inputs,) = _one_batch(name)
    blocks = [m for m in module.modules() if isinstance(m, Checkpointed)]
    roots, gradients = run_forward(module, inputs, 0)
    assert [block.calls for block in blocks] == [1] * len(blocks)
    _, rest = backward_input(roots, gradients, inputs)
    assert [block.calls for block in blocks] == [2] * len(blocks)
    rest.accumulate()
    assert [block.calls for block in blocks] == [2] * len(blocks)


def test_other_hooks_on_saved_tensors() -> None:
    """Saved tensors that a stranger packs are unpacked once, by autograd."""
    unpacked = []

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            def unpack(number: int) -> Tensor:
                unpacked.append(number)
                return packed.pop(number)

            packed: dict[int, Tensor] = {}

            def pack(tensor: Tensor) -> int:
                packed[len(unpacked) + len(packed)] = tensor
                return len(unpacked) + len(packed) - 1

            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return self.inner(x)

    compare(Hooked, STATES)
    assert unpacked

    class Offloaded(Hooked):
        def forward(self, x):
            with save_on_cpu():
                return self.inner(x)

    compare(Offloaded, STATES)


@pytest.mark.parametrize("name", ["mlp", "norms", "in a product and elsewhere"])
def test_hooks_on_parameters_run_in_w_with_the_whole_gradient(name: str) -> None:
    build, kinds = MODULES[name]
    torch.manual_seed(0)
    module = build()
    seen: list[str] = []
    for label, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, label=label: (seen.append(f"before {label}"), gradient * 2)[1])
        parameter.register_post_accumulate_grad_hook(lambda _, label=label: seen.append(f"after {label}"))
    reference = copy.deepcopy(module)
    for parameter in reference.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    by_full_backwards(reference, [make_inputs(kinds, 0)])
    seen.clear()
    inputs = make_inputs(kinds, 0)
    _, rest = backward_input(*run_forward(module, inputs, 0), inputs)
    assert seen == []
    rest.accumulate()
    labels = [label for label, _ in module.named_parameters()]
    assert sorted(seen) == sorted([f"before {label}" for label in labels] + [f"after {label}" for label in labels])
    others = dict(reference.named_parameters())
    assert all(torch.equal(p.grad, others[label].grad) for label, p in module.named_parameters())


@pytest.mark.parametrize("where", ["result", "node", "module"])
@pytest.mark.parametrize("wants_input", [False, True])
def test_hooks_on_results_of_layers_change_their_gradients(where: str, wants_input: bool) -> None:
    """A linear layer of a matrix is one node: its hooks stand between what arrives there and what W needs."""
    calls = []

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
            if where == "module":
                self.first.register_full_backward_hook(lambda module, inputs, outputs: calls.append(1))

        def forward(self, x):
            y = self.first(x if wants_input else x.detach())
            if where == "result":
                y.register_hook(lambda gradient: (calls.append(1), gradient * 3)[1])
                y.retain_grad()
            if where == "node" and wants_input:
                y.grad_fn.register_prehook(lambda gradients: (calls.append(1), (gradients[0] * 3,))[1])
            return self.second(y.tanh())

    compare(Hooked, ((S, D),))
    assert len(calls) == (0 if where == "node" and not wants_input else 6)


@pytest.mark.parametrize("policy", [[torch.ops.aten.addmm.default], [torch.ops.aten.mm.default]])
def test_selective_checkpointing(policy: list[Any]) -> None:
    class Selective(Checkpointed):
        def forward(self, x):
            contexts = partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)

    compare(lambda: nn.Sequential(Selective(mlp()), Selective(mlp(bias=False))), STATES)


def test_reentrant_checkpointing_is_refused() -> None:
    """It accumulates gradients from within; autograd says what to do."""
    x = make_inputs(STATES, 0)[0]
    edge = get_gradient_edge(checkpoint(mlp(), x, use_reentrant=True))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        backward_input([edge], [torch.ones(B, S, D)], [x])


def test_a_saved_tensor_that_was_overwritten_is_an_error() -> None:
    module, (inputs,) = _one_batch("mlp")
    hidden = F.gelu(module[0](inputs[0]))
    edge = get_gradient_edge(module[2](hidden))
    hidden.data.add_(1)  # unseen by autograd
    hidden.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_input([edge], [torch.ones(B, S, D)], inputs)


def test_graphs_of_changing_shape() -> None:
    """Which weights are used how may change from one micro-batch to the next."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            for layer in self.layers[: self.calls]:
                x = layer(x).tanh()
            return x + self.layers[0].weight.sum() if self.calls == 2 else x

    compare(Changing, STATES)


class Births(TorchDispatchMode):
    """Every storage that comes to be, beside those of `outside`."""

    def __init__(self, *outside: Tensor) -> None:
        super().__init__()
        self.outside = [tensor.untyped_storage() for tensor in outside]
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if all(storage._cdata != other._cdata for other in self.outside):
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self) -> list[int]:
        """The bytes of those still there, ascending."""
        return sorted(num_bytes for storage, num_bytes in self.storages.values() if not storage.expired())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_between_i_and_w_only_inputs_and_output_gradients_of_linear_layers_are_kept(checkpointing: bool) -> None:
    module = nn.Sequential(*[nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in range(3)])
    if checkpointing:
        module = nn.Sequential(*map(Checkpointed, module))
    x, g = torch.randn(B * S, D, requires_grad=True), torch.randn(B * S, D)
    with Births(x, g, *module.parameters()) as births:
        graph = [get_gradient_edge(module(x))]
        (gradient,), rest = backward_input(graph, [g], [x])
        graph.clear()
        del gradient
    thin, wide = B * S * D * 4, B * S * 2 * D * 4
    # Inputs of layers: x is the caller's, wide, thin, wide, thin, wide; gradients of outputs: 3 wide, 2 thin, g itself.
    assert births.alive() == [thin] * 4 + [wide] * 6
    rest.accumulate()
    assert births.alive() == []  # those of .grad were born outside


def test_between_i_and_w_a_transformer_block_keeps_what_w_needs() -> None:
    width, length = 32, 16
    block = Block(GPTConfig(width=width, heads=2, sequence_length=length))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    x, g = torch.randn(2, length, width, requires_grad=True), torch.randn(2, length, width)
    with Births(x, g, *block.parameters(), *block.buffers()) as births:
        graph = [get_gradient_edge(block(x))]
        before = sum(births.alive())
        (gradient,), rest = backward_input(graph, [g], [x])
        graph.clear()
        del gradient
    token = 2 * length * width * 4
    linear_inputs, output_gradients, norms = 1 + 1 + 1 + 4, 3 + 1 + 4, 2 * width * 4  # the last output's gradient is g
    assert sum(births.alive()) == (linear_inputs + output_gradients) * token + norms
    assert sum(births.alive()) < before
    recorded: list[Tensor] = []  # a graph of W would keep tensors until W ends
    with saved_tensors_hooks(recorded.append, lambda _: None):
        rest.accumulate()
    assert not recorded
    assert not births.alive()


def test_i_frees_the_graph_even_if_nothing_of_it_is_needed() -> None:
    module, (inputs,) = _one_batch("frozen")
    with Births(*inputs, *module.parameters()) as births:
        roots, gradients = run_forward(module, inputs, 0)
        found, rest = backward_input(roots, gradients, inputs)
        del roots, gradients, found
    assert births.alive() == []
    rest.accumulate()


def test_without_roots_there_is_nothing_to_do() -> None:
    x = torch.ones(2, requires_grad=True)
    found, rest = backward_input([], [], [x])
    assert found == [None]
    rest.accumulate()
    assert x.grad is None


def test_a_root_in_the_middle_of_the_graph() -> None:
    """Outputs that depend on each other: one is the input of a layer that yields the other."""
    torch.manual_seed(1)
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    stage = nn.ModuleList([first, second])

    def run(split: bool) -> list[Tensor | None]:
        x = make_inputs(STATES, 1)[0]
        middle = first(x)
        edges = [get_gradient_edge(middle), get_gradient_edge(second(middle)), GradientEdge(middle.grad_fn, 0)]
        gradients = [torch.full((B, S, D), k) for k in (1.0, 2.0, 3.0)]
        if split:
            (gradient,), rest = backward_input(edges, gradients, [x])
            rest.accumulate()
            return [gradient, *(p.grad for p in stage.parameters())]
        torch.autograd.backward(edges, gradients)
        return [x.grad, *(p.grad for p in stage.parameters())]

    expected = run(split=False)
    stage.zero_grad()
    for actual, other in zip(run(split=True), expected, strict=True):
        assert torch.equal(actual, other)


class Calls(TorchDispatchMode):
    """The products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm"):
            self.names.append(name)
        elif name == "convolution_backward":
            self.names.append("+".join(what for what, wanted in zip(("x", "w", "b"), args[-1], strict=True) if wanted))
        elif name in ("embedding_dense_backward", "embedding_backward"):
            self.names.append("embedding")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "in_i", "in_w"),
    [
        ("mlp", {"mm": 2}, {"mm": 2}),
        ("experts", {"bmm": 1}, {"bmm": 1}),
        ("convolutions", {"x": 2}, {"w+b": 1, "w": 1}),
        ("used thrice abreast", {"mm": 3}, {"mm": 3}),
        ("used both ways", {"mm": 2}, {"mm": 2}),
        ("cut into chunks", {"mm": 3}, {"mm": 3}),
        ("embedding and head tied", {"mm": 1}, {"mm": 1, "embedding": 1}),
        ("embedding", {"mm": 2}, {"mm": 2, "embedding": 1}),
        ("checkpointed custom function", {"mm": 3}, {}),  # one in the recomputation, two in the function's backward
        ("checkpointed convolution", {"x": 1}, {"w+b": 1}),
        ("in a product and elsewhere", {"mm": 2}, {}),
        ("partly frozen", {"mm": 4}, {"mm": 1}),
    ],
)
def test_what_is_computed_when(name: str, in_i: dict[str, int], in_w: dict[str, int]) -> None:
    module, (inputs,) = _one_batch(name)
    roots, gradients = run_forward(module, inputs, 0)
    with Calls() as early:
        _, rest = backward_input(roots, gradients, [x for x in inputs if x.requires_grad])
    with Calls() as late:
        rest.accumulate()
    assert Counter(early.names) == in_i
    assert Counter(late.names) == in_w


class Chance(nn.Module):
    """Operations drawn by chance on a growing list of values; weights enter products, sums, checkpoints, each other."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.weights = nn.ParameterList(torch.randn(D, D) / D**0.5 for _ in range(3))
        self.biases = nn.ParameterList(torch.randn(D) for _ in range(2))
        for parameter in self.parameters():
            parameter.requires_grad_(self.draw.random() < 0.85)
        self.steps = [(self.draw.choice(OPERATIONS), self.draw.random(), self.draw.random()) for _ in range(9)]
        self.wanted = self.draw.sample(range(1, 10), 2)

    def forward(self, x):
        values = [x]
        for operation, here, there in self.steps:
            pick = values[int(here * len(values))], values[int(there * len(values))]
            w, v = self.weights[int(here * 3)], self.weights[int(there * 3)]
            values.append(operation(*pick, w, v, self.biases[int(there * 2)]).tanh())
        return tuple(values[k] for k in self.wanted)


OPERATIONS = [
    lambda x, y, w, v, b: F.linear(x, w, b),
    lambda x, y, w, v, b: F.linear(x, w),
    lambda x, y, w, v, b: x @ w,
    lambda x, y, w, v, b: F.linear(x, w, b) + y @ v,
    lambda x, y, w, v, b: (x.flatten(0, 1) @ w).view(x.shape),
    lambda x, y, w, v, b: torch.addmm(b, y.flatten(0, 1), w, alpha=0.5).view(x.shape),
    lambda x, y, w, v, b: x @ (w @ v),
    lambda x, y, w, v, b: x @ w.tanh() + y,
    lambda x, y, w, v, b: F.linear(x, w[torch.arange(D - 1, -1, -1)]),
    lambda x, y, w, v, b: torch.cat([F.linear(x, part) for part in w.chunk(2)], -1),
    lambda x, y, w, v, b: x * y + w.sum(0),
    lambda x, y, w, v, b: F.layer_norm(x, (D,), b, v[0]),
    lambda x, y, w, v, b: checkpoint(lambda x, y: F.gelu(F.linear(x, w, b)) @ v + y, x, y, use_reentrant=False),
    lambda x, y, w, v, b: checkpoint(lambda x: (x @ w) * (x @ w.t()), x, use_reentrant=False),
    lambda x, y, w, v, b: Square.apply(x, w),
    lambda x, y, w, v, b: torch.bmm(x, torch.stack([w, v, w])),
    lambda x, y, w, v, b: F.linear(x, w).mul_(2).relu_() + y,
    lambda x, y, w, v, b: F.scaled_dot_product_attention(x @ w, y @ w, y @ v),
    lambda x, y, w, v, b: torch.einsum("bsd,de->bse", x.detach(), w),
]


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("block", range(4))
def test_graphs_made_by_chance(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        compare(partial(Chance, seed), STATES, close=True)
