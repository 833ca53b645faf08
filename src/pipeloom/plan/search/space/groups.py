"""Groups: the processes that share a stage, the micro-batch size and the number format. No torch here."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from pipeloom.common.division import divisors
from pipeloom.errors import InputError
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.parallel.options import Precision
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.links import ORDER
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.space.shapes import LEAST_TOKENS, KnownShapes

CanRun = Callable[[Configuration], str | None]  # why a configuration cannot run; None: it can
INNER_DATA = ("pp", "cp", "dp", "tp")  # experts of neighbouring replicas are nearest
MOST_TENSOR = 8  # processes, or those of a larger node: more share every product over a slow network
_OF_GROUPS = frozenset(  # keys of `Request.fixed` and `Request.forbidden` on which groups depend
    {"tensor", "context", "context_kind", "sequence", "expert", "microbatch_size", "precision", "gradients", "order"}
)


class Groups:
    """All groups of a request.

    Args:
        costs: of the model on its cluster.
        request: what is planned.
        refusals: where refused groups are counted.
        can_run: asked for the processes of a stage alone.
        known: groups of other requests with these costs.
    """

    def __init__(
        self, costs: StepCosts, request: Request, refusals: Refusals, can_run: CanRun, known: KnownShapes
    ) -> None:
        self._costs, self._request, self._refusals = costs, request, refusals
        self._can_run, self._known = can_run, known

    def found(self, *, counts: bool = True) -> Iterator[tuple[Configuration, int]]:
        """Configurations with degrees inside a stage and a micro-batch size, and their number of devices.

        Args:
            counts: whether to count those that are refused.
        """
        request, fixed = self._request, self._request.fixed
        sizes = request.devices, request.batch_size, request.optimizer, request.objective == "cost", request.precisions
        given = tuple((name, fixed[name]) for name in sorted(_OF_GROUPS & fixed.keys()))
        key = self._can_run, sizes, given, _OF_GROUPS & request.forbidden
        found = self._known.groups.get(key)
        if found is None:
            found = self._known.groups[key] = list(self._all())
        for each in found:
            if not isinstance(each, str):
                yield each
            elif counts:
                self._refusals.add(each)

    def _all(self) -> Iterator[tuple[Configuration, int] | str]:
        """`found`, and why there are no others."""
        request, node = self._request, self._costs.cluster.devices_per_node
        numbers = divisors(request.devices) if request.objective == "cost" else [request.devices]
        sizes = [n for n in divisors(request.batch_size) if request.allows("microbatch_size", n)]
        for precision in self._precisions():
            if isinstance(precision, str):
                yield precision
                continue
            for inside in self._insides(node, precision):
                if isinstance(inside, str):
                    yield inside
                    continue
                for devices, size in product(numbers, sizes):
                    if devices % inside.processes:
                        continue
                    of = Configuration(
                        microbatch_size=size,
                        inside=inside,
                        precision=precision,
                        optimizer=request.optimizer,
                        order=request.fixed.get("order", INNER_DATA if inside.expert > 1 else ORDER),
                    )
                    unknown = self._costs.unknown(of)
                    yield (of, devices) if unknown is None else unknown

    def _precisions(self) -> Iterator[Precision | str]:
        """Number formats, and why there are no others."""
        request = self._request
        names: tuple[Any, ...] = request.precisions or (request.fixed.get("precision", self._precision()),)
        for name in names:
            try:
                yield Precision(name, request.fixed.get("gradients", "float32"))
            except InputError as error:
                if len(names) == 1:
                    raise
                yield str(error).partition(":")[0]

    def _precision(self) -> str:
        """Tensor cores compute with 16-bit numbers."""
        device = self._costs.cluster.device
        return "fp32" if device.multiprocessors is None else device.half

    def _insides(self, node: int, precision: Precision) -> Iterator[InsideStage | str]:
        """The processes of a stage, and why there are no others."""
        request = self._request
        for tensor, context in product(divisors(request.devices), repeat=2):
            if request.devices % (tensor * context):
                continue
            if not request.allows("tensor", tensor) or not request.allows("context", context):
                continue
            if tensor > max(MOST_TENSOR, node) and "tensor" not in request.fixed:
                yield "tensor parallelism over many nodes"
                continue
            if context > 1 and self._costs.tokens < context * LEAST_TOKENS and "context" not in request.fixed:
                yield f"context parallelism with fewer than {LEAST_TOKENS} tokens per process"
                continue
            experts = [n for n in self._costs.expert_degrees if request.allows("expert", n)]
            kinds = [kind for kind in ("ring", "ulysses") if request.allows("context_kind", kind)]
            for sequence, kind, expert in product((False, True), kinds if context > 1 else ["ring"], experts):
                if (sequence and tensor == 1) or not request.allows("sequence", sequence):
                    continue
                inside = InsideStage(
                    tensor=tensor,
                    context=context,
                    sequence=sequence,
                    context_kind="ulysses" if kind == "ulysses" else "ring",
                    expert=expert,
                )
                refusal = self._why_not_shared(inside, precision)
                yield inside if refusal is None else refusal

    def _why_not_shared(self, inside: InsideStage, precision: Precision) -> str | None:
        """Why processes cannot share a stage; None: they can."""
        of = Configuration(inside=inside, data=inside.expert, precision=precision, optimizer=self._request.optimizer)
        try:
            self._costs.check(of)
        except InputError as error:
            return f"{str(error).partition('=')[0]} cannot be divided"
        return self._can_run(of)
