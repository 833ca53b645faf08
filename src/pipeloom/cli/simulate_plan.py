"""The plan that `pipeloom simulate --out` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeloom import schedules
from pipeloom.cli.simulate_inputs import Inputs
from pipeloom.common.quantities import seconds_text
from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.plan.plan import Plan


def plan_of_simulation(schedule: Schedule, inputs: Inputs, answer: Mapping[str, Any]) -> Plan:
    """The simulated schedule as a plan.

    A schedule that was built for the given costs, or read from a file, is stored with its orders; others by name.

    Args:
        schedule: the simulated schedule.
        inputs: the options of the simulation.
        answer: the numbers of the simulation; predictions if the costs come from a file.

    Raises:
        InputError: a stream, an evaluation, or offloaded activations without a target.
    """
    options, name = inputs.options, inputs.options.names[0]
    if schedule.microbatches_per_update is not None or schedule.forward_only:
        kind = "an evaluation" if schedule.forward_only else "a stream"
        raise InputError(f"--out={options.out}: schedule {name!r} is {kind}. `pipeloom partition --out` plans streams.")
    if options.offload is not None:
        raise InputError(f"--out={options.out}: --offload has no offload target. Remove --offload, and add it by hand.")
    named = name in schedules.FAMILIES and not schedules.find(name).to_measure
    measured = inputs.file is not None
    shards = {} if options.data is None else {"data": options.data, "data_strategy": options.data_strategy}
    return Plan(
        schedule=name if named else schedule,
        pipeline=schedule.num_ranks,
        microbatches=schedule.num_microbatches,
        virtual_stages=schedule.placement.num_chunks,
        slices=schedule.num_slices if schedule.num_slices > 1 else None,
        data_granularity=options.data_granularity,
        predicted_step_seconds=answer["makespan_seconds"] if measured else None,
        predicted_memory_bytes=tuple(answer["peak_bytes"]) if measured and "peak_bytes" in answer else None,
        why=tuple(_reasons(answer)) if measured else (),
        **shards,
    )


def _reasons(answer: Mapping[str, Any]) -> list[str]:
    reasons = [f"The simulated bubble is {100 * answer['bubble_fraction']:.1f} % of the step."]
    best = answer.get("best_named")
    if best is not None:
        reasons.append(f"The fastest named schedule, {best['name']}, takes {seconds_text(best['makespan_seconds'])}.")
    if "lower_bound_seconds" in answer:
        reasons.append(f"No schedule takes less than {seconds_text(answer['lower_bound_seconds'])}.")
    return reasons
