"""Optimality gap of a schedule: the step as a constraint program, solved by OR-tools CP-SAT (an extra of pipeloom).

Every action is an interval; intervals of one rank do not overlap. The memory of a micro-batch is a task on its rank's
memory. Seconds and bytes are rounded to integers such that every schedule stays feasible, so bounds of the program hold
for the step.
"""

import math
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from pipeloom.errors import InputError
from pipeloom.ir.action import Op
from pipeloom.schedules.conditions import Conditions
from pipeloom.schedules.search.bounds import earlier, heads_and_tails
from pipeloom.schedules.search.operations import IntOrders, Work
from pipeloom.schedules.search.search import Found, Measure

_UNITS = 2**24  # of time in the step, and of memory in a cap


def prove(
    found: Found, *, conditions: Conditions, seconds: float = 60.0, workers: int = 8, measure: Measure | None = None
) -> Found:
    """`found` with the higher of its bound and the solver's, and with the solver's schedule if it is shorter.

    The optimality gap is ``makespan / lower_bound - 1`` of the result.

    Args:
        found: the result of `search` under these conditions; the solver starts from it.
        conditions: times, latencies and memory.
        seconds: time limit of the solver; the result depends on the machine.
        workers: threads of the solver, each with another strategy.
        measure: as for `search`.

    Raises:
        InputError: OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise InputError(
            "--prove (pipeloom.schedules.prove) needs the package ortools, which is not installed. Run "
            "`pip install 'pipeloom[search]'`."
        ) from error
    work = Work(found.schedule.placement, found.schedule.num_microbatches, conditions)
    orders = work.orders_of(found.schedule)
    model, starts, unit = _model(cp_model, work, orders, found.lower_bound)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.catch_sigint_signal = False  # it leaves no handler behind: the next Ctrl-C would end the process
    status = _interruptible(solver, model)
    proved = solver.best_objective_bound * unit * (1 - 1e-12)
    bound = max(found.lower_bound, proved * min(1.0, conditions.overlap))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        solved = [sorted(order, key=lambda n: (solver.value(starts[n]), n)) for order in orders]
        if work.all_fit(solved) and work.makespan(solved) < math.inf:
            schedule = work.schedule("search", solved)
            makespan = (measure or work.makespan_of)(schedule)
            if makespan < found.makespan:
                found = replace(found, schedule=schedule, makespan=makespan)
    return replace(found, lower_bound=min(bound, found.makespan))


def _interruptible(solver: Any, model: Any) -> Any:
    """`solver.solve(model)` in a thread, since Python sees Ctrl-C only between its own instructions."""
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(solver.solve, model)
        try:
            return status.result()
        except BaseException:
            while not status.done():  # one that has not begun would not hear of it
                solver.stop_search()
                wait([status], timeout=0.1)
            raise


def _model(cp_model: Any, work: Work, orders: IntOrders, bound: float) -> tuple[Any, list[Any], float]:
    """The program, its variables for the starts of actions, and seconds per unit of time; `orders` are its hint."""
    timed = work.ends(orders)
    assert timed is not None
    ends = timed[0]
    makespan = max(ends)
    unit = (makespan or 1.0) / _UNITS
    model = cp_model.CpModel()
    lasts = [math.floor(seconds / unit) for seconds in work.seconds]
    starts: list[Any] = []
    for head, tail, seconds in zip(*heads_and_tails(work), work.seconds, strict=True):
        latest = max(math.floor(head / unit), math.floor((makespan * (1 + 1e-9) - tail - seconds) / unit))
        starts.append(model.new_int_var(math.floor(head / unit), latest, f"start {len(starts)}"))
    total = model.new_int_var(math.floor(bound / unit * (1 - 1e-9)), _UNITS, "makespan")
    for n, (start, end) in enumerate(zip(starts, ends, strict=True)):
        model.add_hint(start, max(0, math.floor((end - work.seconds[n]) / unit)))
        model.add(start + lasts[n] <= total)
    for start, needs in zip(starts, earlier(work), strict=True):
        for need, lag in needs:
            model.add(start >= starts[need] + lasts[need] + math.floor(lag / unit))
    for rank, order in enumerate(orders):
        model.add_no_overlap([model.new_fixed_size_interval_var(starts[n], lasts[n], f"run {n}") for n in order])
        if math.isfinite(work.caps[rank]):
            _memory(model, work, rank, starts, lasts)
    model.minimize(total)
    return model, starts, unit


def _memory(model: Any, work: Work, rank: int, starts: list[Any], lasts: list[int]) -> None:
    """Limit memory: from the start of F a micro-batch holds I's part until I ends and W's part until W ends."""
    grain = work.caps[rank] / _UNITS
    intervals, sizes = [], []
    for n, action in enumerate(work.actions):
        if work.rank[n] == rank and action.op is not Op.F and work.frees[n]:
            start = starts[work.number[action.with_op(Op.F)]]
            size = model.new_int_var(0, _UNITS, f"held by {action}")
            intervals.append(model.new_interval_var(start, size, starts[n] + lasts[n], f"life of {action}"))
            sizes.append(math.floor(work.frees[n] / grain))
    model.add_cumulative(intervals, sizes, _UNITS)
