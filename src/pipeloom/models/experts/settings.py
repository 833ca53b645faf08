"""What each router is by default, and which settings of a layer of experts go together. Needs no torch."""

import math
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

from pipeloom.errors import InputError

RouterName = Literal["switch", "gshard", "glam", "noisy-topk", "topk", "sigmoid", "expert-choice"]
CapacityGroup = Literal["batch", "sequence"]


class RouterKind(NamedTuple):
    """The defaults of a router.

    Attributes:
        top_k: experts per token; of expert-choice, on average.
        capacity_factor: see `capacity`; None: no limit.
        balance_weight: of the balance loss with `experts` experts, times experts ** `balance_power`.
        balance_power: 2 where the paper's loss is 1 / experts**2 for even loads, so that its weight means the same.
        fixed_k: whether `top_k` cannot be changed.
        matrices: of the router, [E, W] each.
        draws: whether training draws random numbers.
    """

    top_k: int
    capacity_factor: float | None
    balance_weight: float
    balance_power: int = 0
    fixed_k: bool = False
    matrices: int = 1
    draws: bool = False


ROUTERS: dict[str, RouterKind] = {
    "switch": RouterKind(1, 1.25, 0.01, fixed_k=True, draws=True),
    "gshard": RouterKind(2, 1.0, 0.01, balance_power=2, fixed_k=True, draws=True),
    "glam": RouterKind(2, 1.0, 0.01, balance_power=2, fixed_k=True),
    "noisy-topk": RouterKind(2, None, 0.1, matrices=2, draws=True),
    "topk": RouterKind(2, None, 0.01),
    "sigmoid": RouterKind(2, None, 0.0),
    "expert-choice": RouterKind(2, None, 0.0),
}


class ExpertSettings(NamedTuple):
    """The settings of one layer of experts, with the router's defaults filled in.

    Attributes:
        experts: number of routed experts, E.
        router: the router's name.
        top_k: experts per token.
        capacity_factor: see `capacity`; None: no limit.
        capacity_by: the group of tokens that shares the capacity: all tokens of a call, or those of one sequence.
        balance_weight, z_loss_weight: weights of the auxiliary losses; 0: none.
    """

    experts: int
    router: RouterName
    top_k: int
    capacity_factor: float | None
    capacity_by: CapacityGroup
    balance_weight: float
    z_loss_weight: float

    @classmethod
    def of(
        cls,
        *,
        experts: int,
        router: RouterName = "topk",
        top_k: int | None = None,
        capacity_factor: float | None = None,
        capacity_by: CapacityGroup = "batch",
        balance_weight: float | None = None,
        z_loss_weight: float = 0.0,
    ) -> "ExpertSettings":
        """Fill in the defaults of the router.

        Raises:
            InputError: a value is out of range, or has no effect with this router.
        """
        if router not in ROUTERS:
            raise InputError(f"router={router!r}: must be one of {', '.join(ROUTERS)}.")
        kind = ROUTERS[router]
        check_integer("experts", experts, 1)
        if top_k is not None:
            check_integer("top_k", top_k, 1)
        if capacity_by not in get_args(CapacityGroup):
            raise InputError(f"capacity_by={capacity_by!r}: must be one of {', '.join(get_args(CapacityGroup))}.")
        if kind.fixed_k and top_k not in (None, kind.top_k):
            raise InputError(
                f"top_k={top_k}: router {router!r} sends a token to {kind.top_k} expert{'s' * (kind.top_k > 1)}. "
                "Remove top_k, or use router 'topk'."
            )
        chosen = kind.top_k if top_k is None else top_k
        if chosen > experts:
            if kind.fixed_k:
                raise InputError(f"experts={experts}: router {router!r} needs at least {kind.top_k}. Use more experts.")
            chosen_text = (
                f"top_k={chosen}" if top_k is not None else f"top_k={chosen}, the default of router {router!r}"
            )
            fix = "Use more experts, or top_k=1." if experts == 1 else f"Use top_k={experts} or less."
            raise InputError(f"{chosen_text}: must be at most experts={experts}. {fix}")
        if capacity_factor is not None and not (_is_number(capacity_factor) and 0 < capacity_factor < math.inf):
            raise InputError(f"capacity_factor={capacity_factor!r}: must be more than 0. Use 1.0 or more.")
        for name, weight in (("balance_weight", balance_weight), ("z_loss_weight", z_loss_weight)):
            if weight is not None and not (_is_number(weight) and 0 <= weight < math.inf):
                raise InputError(f"{name}={weight!r}: must be 0 or more.")
        if router in ("sigmoid", "expert-choice") and balance_weight:
            raise InputError(
                f"balance_weight={balance_weight}: router {router!r} balances without a loss. Remove it, or use "
                "another router."
            )
        if router == "expert-choice" and top_k is not None and capacity_factor is not None:
            raise InputError(
                f"top_k={top_k}, capacity_factor={capacity_factor}: each is the mean number of experts per token with "
                "router 'expert-choice'. Remove one of them."
            )
        factor = kind.capacity_factor if capacity_factor is None else capacity_factor
        weight = kind.balance_weight * experts**kind.balance_power if balance_weight is None else balance_weight
        return cls(experts, router, chosen, factor, capacity_by, weight, z_loss_weight)

    def capacity(self, tokens: int) -> int | None:
        """Assignments that an expert takes of a group of `tokens`: ceil(top_k * tokens / experts * capacity_factor).

        With router expert-choice, `capacity_factor` takes the place of `top_k` (the c of arXiv:2202.09368, section
        3.1), and an expert takes no token twice. None: no limit.
        """
        if self.router == "expert-choice":
            average = Fraction(self.top_k) if self.capacity_factor is None else Fraction(str(self.capacity_factor))
            return min(tokens, math.ceil(average * tokens / self.experts))
        if self.capacity_factor is None:
            return None
        return math.ceil(Fraction(str(self.capacity_factor)) * self.top_k * tokens / self.experts)


def check_integer(name: str, value: Any, least: int) -> None:
    """Raises InputError where `value` is no integer, or below `least`."""
    rule = f"at least {least}" if least else "0 or more"
    if type(value) is not int:
        raise InputError(f"{name}={value!r}: must be an integer, {rule}.")
    if value < least:
        raise InputError(f"{name}={value}: must be {rule}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
