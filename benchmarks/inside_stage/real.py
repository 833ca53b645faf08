"""Layouts of two processes on two cores: steps predicted from computations alone and collectives alone."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.common.processes import Crew
from benchmarks.inside_stage.subject import Subject, Work, reference_losses

import pipeloom as pl
from pipeloom.models import GPTConfig
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.parallel.traffic import Table, Traffic, together
from pipeloom.passes import lower, merge_backwards
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.costs.link_rate import LinkRate
from pipeloom.plan.stage_times import messages_in_turn, table_seconds

LAYERS, SAMPLES, MICROBATCHES = 2, 4, 4
_SMALL, _CALLS = 1 << 10, 15  # bytes of a call that is nearly latency alone; calls per size and round
TOLERANCE = 1e-4  # of losses


def work_of(inside: InsideStage) -> Work:
    """A GPT in one stage."""
    config = GPTConfig(vocabulary_size=1024, layers=LAYERS, width=256, heads=8, sequence_length=256)
    return Work(config, SAMPLES, pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=MICROBATCHES), inside)


def traffic_of(work: Work) -> Traffic:
    """Calls and bytes of a micro-batch."""
    stage = work.inside.traffic(Architecture.of_gpt(work.config).layer_sizes(work.samples, 4))
    return together([stage.embedding(), *[stage.block()] * LAYERS, stage.norm(), stage.head()])


def measure(name: str, work: Work, rounds: int) -> dict[str, Any]:
    """Rounds of a step whose collectives send nothing, of collectives alone, and of a real step."""
    traffic = traffic_of(work)
    answer: dict[str, Any] = {key: [] for key in ("seconds", "predicted", "recorded", "computing", "collectives")}
    with Crew(name, work.inside.processes, Subject, work, None) as crew:
        crew.call("build", "real")
        crew.call("build", "local")
        losses, expected = crew.call("losses", 2)[0], reference_losses(work, 2)
        answer["error"] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        if answer["error"] > TOLERANCE:
            raise SystemExit(f"{name}: losses are {answer['error']:.1e} from those of one process")
        crew.call("run_first")
        for number in range(rounds + 1):
            crew.call("step", "local")
            alone = _slowest(crew.call("action_seconds", "local"))
            links = {key: _link(crew, key, traffic, work.inside) for key in {*traffic.forward, *traffic.backward}}
            stamps = crew.call("step", "real")
            recorded = _slowest(crew.call("action_seconds", "real"))
            if number == 0:
                continue  # warms up
            sent = [_seconds(table, links, work.inside) for table in traffic]
            answer["seconds"].append(max(end for _, end in stamps) - min(start for start, _ in stamps))
            answer["predicted"].append(_simulated(work, alone["F"] + sent[0], alone["B"] + sent[1]))
            answer["recorded"].append(_simulated(work, recorded["F"], recorded["B"]))
            answer["computing"].append(_simulated(work, alone["F"], alone["B"]))
            answer["collectives"].append(MICROBATCHES * sum(sent))
    return answer


def _slowest(answers: list[dict[str, float]]) -> dict[str, float]:
    return {op: max(answer[op] for answer in answers) for op in ("F", "B")}


def _link(crew: Crew, key: tuple[str, str], traffic: Traffic, inside: InsideStage) -> LinkRate:
    """Latency and bandwidth of a collective, from calls of two sizes."""
    axis, collective = key
    sent = [table[key] for table in traffic if key in table]
    size = max(_SMALL * 2, *(each.num_bytes // each.calls for each in sent))
    answers = crew.call("collective_seconds", axis, collective, [_SMALL, size], _CALLS)
    small, large = (max(median(answer[k]) for answer in answers) for k in (0, 1))
    rate = (size - _SMALL) / max(large - small, 1e-9)
    latency = max(0.0, small - _SMALL / rate) / messages_in_turn(collective, inside.axes[axis])
    return LinkRate(bytes_per_second=rate, latency_seconds=latency)


def _seconds(table: Table, links: Mapping[tuple[str, str], LinkRate], inside: InsideStage) -> float:
    return sum(table_seconds({key: sent}, inside.axes, {key[0]: links[key]}) for key, sent in table.items())


def _simulated(work: Work, forward: float, backward: float) -> float:
    costs = pl.Costs.per_stage(forward=[forward], backward=[backward])
    return pl.simulate(lower(merge_backwards(work.schedule)), costs).makespan
