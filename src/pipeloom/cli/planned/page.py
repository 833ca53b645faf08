"""``pipeloom plan --html``: the answer of a search as a page."""

from collections.abc import Sequence
from math import inf

from pipeloom.common.quantities import counted, seconds_text
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search import words
from pipeloom.plan.search.best_first import Answer
from pipeloom.plan.search.comparison import USUAL_NAME
from pipeloom.plan.search.request import Request
from pipeloom.report import ShownPlan, plan_html


def plan_page(
    costs: StepCosts,
    request: Request,
    answer: Answer,
    rows: Sequence[words.Row],
    reasons: Sequence[str],
    usual: words.Row | None,
) -> str:
    """The text of the page.

    Args:
        costs: of the model on its cluster.
        request: what was planned.
        answer: the plans.
        rows: the plans as in ``--json``.
        reasons: why the best one won, and what others lack.
        usual: the usual choice, whose time is shown too; None: it does not fit.
    """
    columns, *cells = words.cells_of(rows)
    others = [] if usual is None else [ShownPlan(name=USUAL_NAME, cells=(), seconds=words.named_seconds(usual))]
    found = answer.plans[0]
    return plan_html(
        [
            ShownPlan(name=f"plan {number}", cells=mine, seconds=words.named_seconds(row))
            for number, (mine, row) in enumerate(zip(cells, rows, strict=True), 1)
        ],
        title=f"{costs.name} on {counted(request.devices, 'device')} of {costs.cluster.name}",
        lead=(
            f"Global batch of {counted(request.batch_size, 'sample')}; {answer.considered:,} configurations "
            f"considered, {answer.simulated:,} simulated, in {seconds_text(answer.seconds)}. The best is "
            f"{words.degrees_text(rows[0])}: {seconds_text(rows[0]['step_seconds'])} per step."
        ),
        columns=columns,
        peak_bytes=found.peak_bytes,
        memory_bytes=None if request.memory_bytes == inf else request.memory_bytes,
        timeline=found.timeline,
        reasons=[*words.summary(rows[0]), *words.early_end(answer), *reasons],
        refused=answer.refused,
        others=others,
    )
