"""Cuts layers of experts, such as `pipeloom.models.experts.Experts`: between processes along ep, and each expert along
tp.

    parameter        shape        ep        tp
    up               [E, F, W]    dim 0     dim 1
    gate_up          [E, 2F, W]   dim 0     dim 1, gates and values each
    down             [E, W, F]    dim 0     dim 2
    shared_up        linear       -         column
    shared_down      linear       -         row
    router.*         any          -         whole: every tensor-parallel rank routes all tokens
    others           [E, ...]     dim 0     as the layer's `tensor_cuts` says: experts of transformers
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipeloom.common.division import divisors
from pipeloom.errors import InputError, either
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import share_gradient
from pipeloom.parallel.expert.dispatch import ExpertDispatch
from pipeloom.parallel.expert.traffic import Exchange
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.placed import Cut, Place, Placed, Section, even
from pipeloom.parallel.tensor.one_d.cutting import Cutter
from pipeloom.parallel.tensor.one_d.tokens import gather_tokens, scatter_sum

_EP, _TP = ("ep",), ("tp",)
_CUT_BY_TP = {"up": (1, 1), "gate_up": (1, 2), "down": (2, 1)}  # dimension, and number of sections


def _tensor_cuts(layer: Any) -> dict[str, tuple[int, int]]:
    """How the parameters of a layer of experts are cut along tp."""
    found: dict[str, tuple[int, int]] = getattr(layer, "tensor_cuts", _CUT_BY_TP)
    return found


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a layer of experts: it has an exchangeable `dispatch`."""
    return hasattr(module, "dispatch") and hasattr(module, "num_experts")


def expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of experts of a model, by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def router_parameters(layers: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    """The parameters of the layers' own routers: tensor-parallel ranks have their full gradient."""
    routers = (getattr(layer, "router", None) for layer in layers.values())
    return [parameter for router in routers if router is not None for parameter in router.parameters()]


class ExpertCutter:
    """Replaces the parameters of layers of experts by this process's blocks, and lets the layers communicate.

    Args:
        mesh: with axes ep and tp.
        cutter: of the whole model.
        sequence: whether the layers' input and output have a part of the tokens, [B, S / t, W].
        exchange: how rows are sent along ep.
    """

    def __init__(self, mesh: Mesh, cutter: Cutter, *, sequence: bool, exchange: Exchange) -> None:
        self._ep, self._tp = mesh.axis("ep"), mesh.axis("tp")
        self._cutter, self._sequence, self._exchange = cutter, sequence and self._tp.degree > 1, exchange
        self._place: Place = mesh.place if self._ep.degree == 1 else mesh.expert_place

    def check(self, name: str, module: nn.Module) -> None:
        """Raises InputError where a layer cannot be cut."""
        if not is_experts(module):
            raise InputError(
                f"plan has {name!r}: 'experts': {type(module).__name__} has no experts. Name a "
                "pipeloom.models.experts.Experts."
            )
        layer: Any = module
        if layer.num_experts % self._ep.degree:
            raise InputError(
                f"{name!r} has {layer.num_experts} experts, which ep={self._ep.degree} processes cannot share evenly. "
                f"Use ep={either(divisors(layer.num_experts))}."
            )
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.shape[:1] != (layer.num_experts,):
                raise InputError(
                    f"{f'{name}.{key}'!r} has shape {list(parameter.shape)}: parameters of experts must be stacks of "
                    f"{layer.num_experts}. Put others into a submodule."
                )
            if self._tp.degree > 1:
                self._check_tensor(name, layer, key, tuple(parameter.shape))
        if self._exchange == "capacity" and self._ep.degree > 1 and not layer.has_capacity:
            raise InputError(
                f"exchange='capacity': the experts of {name!r} have no capacity. Set capacity_factor, or use "
                "exchange='counts'."
            )

    def _check_tensor(self, name: str, layer: Any, key: str, shape: tuple[int, ...]) -> None:
        cuts = _tensor_cuts(layer)
        if key not in cuts:
            raise InputError(
                f"{f'{name}.{key}'!r}: experts with biases, or with a norm behind each, cannot be cut along tp. Use "
                "tp=1 and ep, or leave them out of the plan."
                if not cuts
                else f"{f'{name}.{key}'!r}: experts are cut along tp by {', '.join(cuts)} alone. Use tp=1 and ep, or a "
                "pipeloom.models.experts.Experts."
            )
        if self._sequence and not hasattr(layer, "router"):
            raise InputError(
                f"{name!r} ({type(layer).__name__}): experts of transformers take all tokens of a sample. Use "
                "sequence=False."
            )
        dim, sections = cuts[key]
        width = shape[dim] // sections
        if width % self._tp.degree:
            raise InputError(
                f"{name!r} has experts of width {width}, which {self._tp.degree} tensor-parallel ranks cannot share "
                f"evenly. Use tp={either(divisors(width))}."
            )

    def cut(self, name: str, module: nn.Module) -> None:
        """Cut the layer in place. Shared experts are cut by the caller, as linear layers."""
        layer: Any = module
        for key, parameter in list(module.named_parameters(recurse=False)):
            how = self._placed(layer, key, tuple(parameter.shape))
            setattr(layer, key, self._cutter.block_of(parameter, how, f"{name}.{key}", self._place))
        layer.dispatch = ExpertDispatch(self._ep, self._tp, sums_input=not self._sequence, exchange=self._exchange)
        if self._tp.degree > 1:
            if self._sequence:
                layer.enter = _Enter(self._tp)
            layer.leave = _Leave(self._tp, sequence=self._sequence)
        if self._sequence:
            layer.router.register_forward_pre_hook(_EqualParts(self._tp))

    def _placed(self, layer: Any, key: str, shape: tuple[int, ...]) -> Placed:
        cuts: dict[int, Cut] = {}
        if self._ep.degree > 1:
            cuts[0] = even(shape[0], self._ep.degree, _EP)
        if self._tp.degree > 1:
            dim, sections = _tensor_cuts(layer)[key]
            cuts[dim] = Cut(_TP, (Section(shape[dim] // sections, self._tp.degree),) * sections)
        return Placed(shape, cuts)


class _Enter:
    """All tokens, from the part of this process; gradients are summed over processes, each for its tokens."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, x: Tensor) -> Tensor:
        return gather_tokens(x, self._axis)


class _Leave:
    """The sum of the results of all processes: of all tokens, or of the part of this process."""

    def __init__(self, axis: Axis, *, sequence: bool) -> None:
        self._axis, self._sequence = axis, sequence

    def __call__(self, y: Tensor) -> Tensor:
        return scatter_sum(y, self._axis, sequence=self._sequence)


class _EqualParts:
    """Divides the gradient of a router's input, equal on all processes, so that the sum of `_Enter` counts it once."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, router: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = arguments
        return (share_gradient(x, self._axis), *others)
