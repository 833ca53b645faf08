"""`pipeloom plan`: the fastest way to train a model on a cluster."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, get_args

from pipeloom.cli.common.parser import Parser
from pipeloom.cli.common.planning import train_command
from pipeloom.cli.planned.model import Checks, Planned, add_model_options, planned_model
from pipeloom.common.atomic_file import check_named, write_named
from pipeloom.common.quantities import Bytes, bytes_text, counted, percent_text, seconds_text
from pipeloom.errors import InputError
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.named_clusters import CLUSTERS, find_cluster
from pipeloom.plan.costs.software import PIPELOOM, SOFTWARE
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.local.saved import notices
from pipeloom.plan.memory import OPTIMIZERS
from pipeloom.plan.search import words
from pipeloom.plan.search.answer import json_of, plan_of, predicted, row_of
from pipeloom.plan.search.best_first import Answer, find_plans, rare_collections
from pipeloom.plan.search.comparison import USUAL_NAME, more_memory, usual_plan
from pipeloom.plan.search.request import (
    COMMAND,
    FIXABLE,
    MOST_DEVICES,
    MOST_SAMPLES,
    USUAL,
    Objective,
    Request,
    check_conditions,
    check_offload,
    given_names,
    parse_fixed,
    parse_forbidden,
    parse_precisions,
)
from pipeloom.plan.search.simulated import Steps
from pipeloom.plan.search.tree.tree_search import Tell

_PROGRESS_SECONDS = 10.0  # between two lines of a long search
_SHOWN = 3  # plans that are compared in words
_DESCRIPTION = """\
Choose everything for training a model on a cluster: pipeline-, data-, tensor-, sequence-, context- and
expert-parallel degrees and their order over links, schedule, virtual stages, blocks per stage, micro-batches, slices,
recomputation per stage, ZeRO stage and granularity, offload. Times and memory are predicted, and every
plan keeps the rules of a run."""
_EXAMPLES = """
pipeloom plan --model.config gpt3-175b --cluster dgx-a100-80 --devices 384 --batch.size 1536
pipeloom plan --model.config llama3-405b --cluster dgx-h100 --devices 16384 --batch.size 2048 --top 5 --out plan.json
pipeloom plan --model.config config.json --cluster dgx-a100-80 --devices 16 --batch.size 128 --fix tensor=8,slices=1
pipeloom plan --model.layers 8 --model.width 256 --model.heads 8 --cluster local --devices 2 --batch.size 32
pipeloom plan --profile profile.json --cluster cluster.json --devices 4 --batch.size 64 --out plan.json
"""


_MOST = {"devices": MOST_DEVICES, "batch.size": MOST_SAMPLES, "top": 10_000}


@rare_collections()
def main(argv: Sequence[str]) -> int:
    """Search, and print the best plans; returns the exit code."""
    options = _parser().parse_args(list(argv))
    numbers = {"devices": options.devices, "batch.size": options.batch.size, "top": options.top}
    for name, value in numbers.items():
        if value < 1:
            raise InputError(f"--{name}={value}: must be at least 1.")
        if value > _MOST[name]:
            raise InputError(f"--{name}={value}: must be at most {_MOST[name]:,}. Use a smaller number.")
    check_named({"--out": options.out, "--html": options.html})
    cluster = find_cluster(options.cluster, "--cluster")
    fixed = {} if options.fix is None else parse_fixed(options.fix)
    forbidden = frozenset[str]() if options.forbid is None else parse_forbidden(options.forbid)
    check_conditions(fixed, forbidden, "--fix", f"--forbid={options.forbid}")
    precisions: tuple[str, ...] = () if options.precision is None else parse_precisions(options.precision)
    if precisions and "precision" in fixed:
        raise InputError(f"--precision={options.precision}: precision is in --fix too. Remove it from one of them.")
    if options.profile is not None:
        from pipeloom.cli.planned.profile import planned_profile

        planned = planned_profile(options.as_dict(), cluster, fixed)
    else:
        planned = _planned(options, cluster, fixed)
    costs = planned.costs
    check_offload(fixed, cluster, f"--fix={options.fix}", can_offload=costs.can_offload)
    cap = options.memory.cap
    if cap is not None and cap < 1:
        raise InputError(f"--memory.cap={cap}: must be at least 1 byte.")
    request = Request(
        devices=options.devices,
        batch_size=options.batch.size,
        memory_bytes=cluster.usable_bytes(options.devices) if cap is None else float(cap),
        fixed=planned.fixed,
        forbidden=forbidden | planned.forbidden,
        optimizer=options.optimizer,
        objective=options.objective,
        top=options.top,
        ends_alone=planned.ends_alone,
        precisions=precisions,
        names=COMMAND._replace(
            given=given_names(**{"--fix": options.fix, "--forbid": options.forbid, "--precision": options.precision})
        ),
    )
    asked: dict[str, Any] = {"can_run": planned.can_run, "accept": planned.accept, "steps": Steps(costs)}
    answer = find_plans(costs, request, exhaustive=options.exhaustive, tell=_progress(request), **asked)
    rows = [row_of(costs, found) for found in answer.plans]
    plan = plan_of(costs, answer.plans[0].of, answer.plans[0].schedule_limit, **predicted(answer.plans[0]))
    lines, usual = ([], None) if options.json and options.html is None else _why(costs, request, answer, rows, asked)
    if options.html is not None:
        from pipeloom.cli.planned.page import plan_page  # most commands need no pages, which take long to load

        write_named("--html", options.html, plan_page(costs, request, answer, rows, lines, usual))
    if options.out is not None:
        end = words.early_end(answer)
        counted = f"It is the fastest of {answer.considered:,} configurations."
        why = (*words.summary(rows[0]), *(end or ([counted] if options.objective == "time" else [])), *lines)
        write_named("--out", options.out, replace(plan, why=why).to_json() + "\n")
    if options.json:
        print(json.dumps(json_of(answer, rows), allow_nan=False))
        return 0
    shown = words.lines_of(rows, request.memory_bytes, options.devices)
    for line in [*_notices(cluster, request), *shown, *lines, *words.counts_of(answer)]:
        print(line)
    if options.html is not None:
        print(f"wrote {options.html}")
    if options.out is not None:
        own = planned.options
        run = "" if own is None else f"; run it: {train_command({'plan': options.out, **own})}"
        print(f"wrote {options.out}{run}")
    return 0


def _progress(request: Request) -> Tell:
    """What says on stderr, every ten seconds of a search, what it has found so far."""
    first = last = time.monotonic()
    text = {"time": seconds_text, "memory": bytes_text, "cost": "{:.4g} device seconds".format}[request.objective]

    def tell(simulated: int, value: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _PROGRESS_SECONDS:
            return
        last = now
        best = "no plan yet" if value == inf else f"best {request.objective} {text(value)}"
        line = f"searching for {now - first:.0f} s: {counted(simulated, 'configuration')} simulated, {best}"
        print(line, file=sys.stderr, flush=True)

    return tell


def _planned(options: Any, cluster: Cluster, fixed: Mapping[str, Any]) -> Planned:
    """The transformer that the options name."""
    model = planned_model(options.as_dict(), options.batch.size, options.optimizer)
    costs = CostModel(model=model.model, cluster=cluster, software=SOFTWARE[options.software])
    checks = Checks(costs, model)
    return Planned(
        costs=costs,
        options=model.options,
        forbidden=checks.forbidden(),
        ends_alone=checks.ends_alone,
        fixed=fixed,
        can_run=checks.can_run,
        accept=checks.accept,
    )


def _notices(cluster: Cluster, request: Request) -> Iterator[str]:
    """What the reader of plans should know of the cluster, and of a cap that its devices do not have."""
    yield from notices(cluster)
    memory = cluster.device_bytes(request.devices)
    if memory is not None and request.memory_bytes > memory:
        yield f"{request.names.cap} is above the {bytes_text(memory)} of a device: these plans need devices with more."


def _why(
    costs: StepCosts, request: Request, answer: Answer, rows: Sequence[words.Row], asked: Mapping[str, Any]
) -> tuple[list[str], words.Row | None]:
    """Why the next plans and the usual choice, which is returned too, lost, and what more memory would give."""
    best = rows[0]
    lines = [words.against(best, row, number) for number, row in enumerate(rows[1:_SHOWN], 2)]
    if (found := more_memory(costs, request, answer.plans[0], **asked)) is not None:
        more, seconds = found
        faster = percent_text(1 - seconds / best["step_seconds"])
        lines.append(f"{bytes_text(more)} more per device: at least {faster} faster")
    if not isinstance(costs, CostModel) or (usual := usual_plan(costs, request, **asked)) is None:
        return lines, None
    row = row_of(costs, usual)
    return [*lines, words.usual_text(best, row, USUAL_NAME)], row


def _parser() -> Parser:
    parser = Parser(prog="pipeloom plan", description=_DESCRIPTION, examples=_EXAMPLES)
    option = parser.add_argument
    option("--cluster", type=str, required=True, metavar="NAME|FILE", help=f"{', '.join(CLUSTERS)}, local, or a file")
    option("--devices", type=int, required=True, help="devices of the cluster that are used")
    option("--batch.size", type=int, required=True, help="global batch size in samples")
    option("--profile", type=str, metavar="FILE", help="measured layers of any model, in place of --model")
    add_model_options(parser)
    group = parser.add_argument_group("search")
    option = group.add_argument
    option("--fix", type=str, metavar="KEY=VALUE,..", help=f"values that plans must have: {', '.join(FIXABLE)}")
    option("--forbid", type=str, metavar="KEY,..", help=f"what plans must not have: {', '.join(USUAL)}")
    formats = "number formats to choose from, such as fp32,bf16 (default: bf16; V100: fp16; CPUs: fp32)"
    option("--precision", type=str, metavar="NAME,..", help=formats)
    option("--objective", choices=list(get_args(Objective)), default="time", help="what is minimized")
    option("--memory.cap", type=Bytes | None, help="bytes per device (default: 92 % of the device's memory)")
    option("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="optimizer, for memory and updates")
    option("--software", choices=list(SOFTWARE), default=PIPELOOM.name, help="kernels and overlap")
    option("--exhaustive", action="store_true", help="simulate all configurations, to compare")
    group = parser.add_argument_group("output")
    option = group.add_argument
    option("--top", type=int, default=3, help="number of plans")
    option("--out", type=str, metavar="FILE", help="plan file to write, for `pipeloom train --plan`")
    option("--html", type=str, metavar="FILE", help="page to write: plans, time, memory, timeline, refusals")
    option("--json", action="store_true", help="output as one JSON object")
    return parser
