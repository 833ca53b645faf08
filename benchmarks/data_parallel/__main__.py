"""Step time of PP2 x DP2 with every strategy: pipeloom, torch.distributed.pipelining, DeepSpeed; and pipeloom's PP4."""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common.peers import prepare_deepspeed
from benchmarks.common.ping_pong import one_way_seconds
from benchmarks.common.processes import Crew, CrewError
from benchmarks.common.report import Parts, Table, environment, markdown, save, table
from benchmarks.common.statistics import Spread, ratio, spread
from benchmarks.common.workloads import GPTWorkload
from benchmarks.data_parallel.predict import Predictions
from benchmarks.data_parallel.systems import ReplicaGroup, System, step_seconds
from benchmarks.data_parallel.workload import TOLERANCE, judge, write_reference

NUM_PROCESSES = 4
ANSWER_SECONDS = 120.0  # a peer that hangs, or builds an extension for longer, fails
NUM_MESSAGES = 25  # of each process and round, to see what they take
# The global batch; each of two copies has half of the micro-batches.
CONFIGURATIONS = {
    "1x64 M=8": GPTWorkload(micro_batch=1, sequence_length=64, num_microbatches=16),
    "4x64 M=8": GPTWorkload(micro_batch=4, sequence_length=64, num_microbatches=16),
    "1x32 M=8, 48 small layers": GPTWorkload(
        micro_batch=1, sequence_length=32, num_microbatches=16, width=64, heads=4, blocks=48
    ),
}
SCHEDULES = ("1f1b", "bfs", "zb-h1")
OWN = ("ddp", "parameter-server", "zero1", "zero2", "zero3", "zero2/microbatch", "zero3/microbatch")
TORCH = ("ddp", "fsdp", "fsdp-reshard")
DEEPSPEED = ("ddp", "zero1")
MAY_FAIL = ("torch", "deepspeed")
# What stands against what: the same held between steps, gathered and reduced as often.
AGAINST_TORCH = {"ddp": "ddp", "zero3": "fsdp", "zero3/microbatch": "fsdp-reshard"}


def systems(schedules: list[str], strategies: list[str]) -> dict[str, System]:
    """All systems, by name."""
    found = {}
    for schedule in schedules:
        found[f"pipeloom {schedule} PP4"] = System(kind="pipeloom", schedule=schedule, pp=4, dp=1, data="ddp")
        for kind, all_data in {"pipeloom": strategies, "torch": TORCH, "deepspeed": DEEPSPEED}.items():
            if kind == "deepspeed" and (schedule != "1f1b" or find_spec("deepspeed") is None):
                continue
            for data in all_data:
                found[f"{kind} {schedule} {data}"] = System(kind=kind, schedule=schedule, pp=2, dp=2, data=data)
    return found


def measure(workload: GPTWorkload, chosen: dict[str, System], num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Each library has four processes for all its systems (`Crews`); a round gives every system its turn.

    The time of a system in a round is the median of its steps there.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    with_update: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    predictions = Predictions()
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch, ExitStack() as stack:
        reference = Path(scratch) / "reference.safetensors"
        write_reference(workload, reference)
        crews = stack.enter_context(Crews(workload, chosen))
        outcomes: dict[str, float | str] = {}
        for name in chosen:
            outcomes[name] = crews.outcome(name, reference)
            print(f"{name}: {outcomes[name]}", flush=True)
        timed = {name: system for name, system in chosen.items() if isinstance(outcomes[name], float)}
        for round_number in range(num_rounds):
            if any(system.crew == "pipeloom" for system in timed.values()):
                messages = one_way_seconds(crews["pipeloom"].call("ping_pong", NUM_MESSAGES))
                predictions.add_pings(crews["pipeloom"].call("collectives", workload), messages)
            for name in timed if round_number % 2 else reversed(timed):
                crew = crews[timed[name].crew]
                # One step first, untimed: its caches were used by the others since its last turn.
                stamps = [of_rank[1:] for of_rank in crew.call("run_steps", name, 1 + num_steps)]
                seconds[name].append(spread(step_seconds(stamps, update=False)).median)
                with_update[name].append(spread(step_seconds(stamps, update=True)).median)
                cpu[name].append(spread([sum(s.cpu for s in step) for step in zip(*stamps, strict=True)]).median)
                if timed[name].kind == "pipeloom":
                    predictions.add_records(name, crew.call("records", name))
                    predictions.add_units(name, crew.call("units", name))
    predicted = {
        name: predictions.step_seconds(name, *system.pipeline(workload), computing_of(name))
        for name, system in timed.items()
        if system.kind == "pipeloom" and computing_of(name) in timed
    }
    return {
        "outcomes": outcomes,
        "seconds": seconds,
        "with_update": with_update,
        "cpu": cpu,
        "predicted": predicted,
        "collectives": predictions.collectives,
    }


class Crews(AbstractContextManager["Crews"]):
    """Four processes for the systems of each library, which are built when they are first asked for.

    A peer that fails ends its processes: those that it shared them with are built again in new ones.
    """

    def __init__(self, workload: GPTWorkload, chosen: dict[str, System]) -> None:
        self._workload, self._chosen = workload, chosen
        self._crews: dict[str, Crew] = {}
        self._built: dict[str, list[str]] = defaultdict(list)

    def __getitem__(self, name: str) -> Crew:
        if name not in self._crews:
            self._crews[name] = Crew(name, NUM_PROCESSES, ReplicaGroup, timeout_seconds=ANSWER_SECONDS)
            for system in self._built[name]:
                self._crews[name].call("build", system, self._chosen[system], self._workload)
        return self._crews[name]

    def outcome(self, name: str, reference: Path) -> float | str:
        """Build a system; its largest error or, of a peer, why it is not timed: it is wrong, fails, or does not answer.

        Raises:
            AssertionError, CrewError: pipeloom is wrong or fails.
        """
        system = self._chosen[name]
        try:
            crew = self[system.crew]
            crew.call("build", name, system, self._workload)
            error = judge(self._workload, crew.call("check", name, self._workload, str(reference)), reference)
        except CrewError as failure:
            if system.kind not in MAY_FAIL:
                raise
            self._crews.pop(system.crew).close()
            return f"{'fails' if failure.raised else 'no answer'}: {failure.reason}"
        self._built[system.crew].append(name)
        if error <= TOLERANCE:
            return error
        if system.kind not in MAY_FAIL:
            raise AssertionError(f"{name} differs from one process by {error:.1e}")
        return f"wrong, by {error:.1f}"

    def __exit__(self, *_: object) -> None:
        for crew in self._crews.values():
            crew.close()


def computing_of(name: str) -> str:
    """The system whose computing times foretell those of `name`: that of the same schedule whose copies only reduce."""
    return name if name.endswith("PP4") else f"{name.rsplit(maxsplit=1)[0]} ddp"


def tables(results: dict[str, Any]) -> Parts:
    """Every system's times, prediction and error, then the ratios, by configuration."""
    parts: list[str | Table] = []
    for label, result in results.items():
        rows: list[tuple[object, ...]] = []
        for name, found in result["outcomes"].items():
            if isinstance(found, str):
                rows.append((name, found.partition(":")[0], "", "", "", ""))
                continue
            # DeepSpeed's step and update are one call.
            own = "" if _is_one_call(name) else spread(result["seconds"][name]).show("{:.1f}", 1e3)
            both = spread(result["with_update"][name]).show("{:.1f}", 1e3)
            predicted = result["predicted"].get(name)
            foreseen = "" if predicted is None else f"{1e3 * predicted:.1f}"
            used = spread(result["cpu"][name]).show("{:.0f}", 1e3)
            rows.append((name, own, both, foreseen, used, f"{found:.0e}"))
        parts.append(f"### {label}")
        header = ("system", "ms a step", "ms with the update", "simulated step", "CPU ms, 4 processes", "largest error")
        parts.append(table(header, rows))
        parts += [f"{name} {found}" for name, found in result["outcomes"].items() if ":" in str(found)]
        rows = []
        for a, b in comparisons(list(result["seconds"])):
            with_update = ratio(result["with_update"][a], result["with_update"][b]).show("{:.3f}")
            step = "" if _is_one_call(b) else ratio(result["seconds"][a], result["seconds"][b]).show("{:.3f}")
            cpu = ratio(result["cpu"][a], result["cpu"][b]).show("{:.3f}")
            rows.append((f"{a} / {b}", step, with_update, cpu))
        parts.append(table(("ratio of times: median (quartiles)", "step", "with the update", "CPU"), rows))
        collectives = ", ".join(
            f"{name} {1e3 * seconds:.1f}" for name, seconds in result["collectives"].items() if seconds
        )
        parts.append(f"All layers of a rank, by themselves, ms: {collectives}")
    return parts


def _is_one_call(name: str) -> bool:
    return name.startswith("deepspeed")


def comparisons(names: list[str]) -> list[tuple[str, str]]:
    """What is divided by what."""
    pairs = []
    for name in names:
        kind, schedule, data = name.split()
        if kind != "pipeloom":
            continue
        if data in AGAINST_TORCH:
            pairs.append((name, f"torch {schedule} {AGAINST_TORCH[data]}"))
        if data in DEEPSPEED:
            pairs.append((name, f"deepspeed {schedule} {data}"))
        if data != "PP4":
            pairs.append((name, f"pipeloom {schedule} PP4"))
    return [pair for pair in pairs if pair[1] in names]


def headlines(results: dict[str, Any]) -> dict[str, Spread]:
    """Ratios for the README: step with update, against the libraries that can do it."""
    found = {}
    for label, result in results.items():
        for a, b in comparisons(list(result["with_update"])):
            if not b.endswith("PP4"):
                found[f"{label}: {a} / {b}"] = ratio(result["with_update"][a], result["with_update"][b])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_parallel", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a system in a round")
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["1f1b"])
    parser.add_argument("--strategies", nargs="+", choices=OWN, default=list(OWN))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "data_parallel.json")
    arguments = parser.parse_args()
    machine = environment()
    if find_spec("deepspeed") is not None:
        prepare_deepspeed()
    chosen = systems(arguments.schedules, arguments.strategies)
    results = {}
    for label in arguments.configurations:
        results[label] = measure(CONFIGURATIONS[label], chosen, arguments.rounds, arguments.steps)
        print(markdown(tables({label: results[label]})), flush=True)
    settings = {"rounds": arguments.rounds, "steps": arguments.steps, "num_processes": NUM_PROCESSES}
    save(arguments.output, settings, machine, results, tables(results), headlines(results))


if __name__ == "__main__":
    main()
