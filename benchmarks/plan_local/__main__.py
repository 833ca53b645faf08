"""The plan that is predicted to be fastest on this machine, beside the measured steps of all configurations."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.processes import Crew
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.plan_local.cases import CASES, SCHEDULES, Case, configurations, label, paired
from benchmarks.plan_local.subject import Trainer

from pipeloom.parallel import Precision
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster, parse_cluster
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.named_clusters import find_cluster
from pipeloom.plan.local import trials
from pipeloom.plan.local.layer_times import LayerTimes, mean_layers
from pipeloom.plan.local.references import References, Shape, lower_quartile

KINDS = ("profile", "layers", "tables")  # of predictions
CHOICES = ("trials", *KINDS)
_QUIET = 0.1  # of the cores' time that others may use during a measurement
_WARM_UP = 2  # steps of a configuration in a round before those that count
_MOST_TRIES = 3  # rounds over those that count
_CROWDED = 2  # micro-batch sizes that more processes than cores measure at once
_NEAR = 1.05  # chosen over fastest
_FINALISTS = 4  # configurations measured fastest, which are measured again beside the chosen ones


def measure(case: Case, crew: Crew, cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """The layers of a model as measured, and for each configuration predicted seconds and bytes, and measured ones."""
    rows = [{"label": label(of), "measured": [], "disturbed": [], "others": []} for of in configurations(case)]
    layers, references = take_turns(case, crew, cluster, rows, arguments)
    predict(case, cluster, layers, references, rows)
    measure_best(case, crew, cluster, rows, arguments)
    profile = {"layers": layers.to_mapping(), "references": references.to_mapping()}
    return {"summary": summary(rows), **profile, "rows": rows}


def measure_layers(case: Case, crew: Crew, cluster: Cluster, side_by_side: int) -> list[LayerTimes]:
    """Measure the layers of the model on so many processes at the same time."""
    sizes = microbatch_sizes(case)[: None if side_by_side < case.processes or case.processes <= 2 else 2]
    answers = crew.call("layers", case.config, sizes, cluster.beside(case.processes).rates, side_by_side)
    return [each for each in answers if each is not None]


def microbatch_sizes(case: Case) -> list[int]:
    """Those of all configurations, ascending."""
    return sorted({of.microbatch_size for of in configurations(case)})


def predict(
    case: Case, cluster: Cluster, layers: LayerTimes, references: References, rows: list[dict[str, Any]]
) -> None:
    """Predict the step of each configuration."""
    model = Architecture.of_gpt(case.config)
    plain = CostModel(model=model, cluster=cluster, measured=layers)
    models = {
        "profile": plain.corrected_by(references, Precision("fp32")),
        "layers": plain,
        "tables": CostModel(model=model, cluster=cluster),
    }
    for of, row in paired(case, rows):
        predictions = {kind: costs.predict(of) for kind, costs in models.items()}
        row["predicted"] = {kind: each.step_seconds for kind, each in predictions.items()}
        row["update"] = predictions["profile"].update_seconds
        row["stages"] = models["profile"].stage_seconds(of)
        row["bubble"] = predictions["profile"].timeline.bubble_fraction
        row["predicted_bytes"] = max(models["profile"].peak_bytes(of))


def take_turns(
    case: Case, crew: Crew, cluster: Cluster, rows: list[dict[str, Any]], arguments: argparse.Namespace
) -> tuple[LayerTimes, References]:
    """Measure layers and steps of all configurations in rounds; steps during which others used the cores are repeated.

    Returns:
        The mean of the layers, and the reference steps of all rounds, which are measured before the configurations of
        the same shape: the machine's speed drifts, and so all see the same of it.
    """
    references = list[References]()
    cores, layers, crowded = cluster.measured.cores if cluster.measured else 1, list[LayerTimes](), list[LayerTimes]()
    of_degrees: dict[tuple[int, ...], list[tuple[Configuration, dict[str, Any]]]] = {}
    for of, row in paired(case, rows):
        of_degrees.setdefault((of.pipeline, of.inside.tensor, of.data), []).append((of, row))
    for number in range(_MOST_TRIES * arguments.rounds):
        if number < arguments.rounds:
            layers += measure_layers(case, crew, cluster, cores)
            if case.processes > cores:
                crowded += measure_layers(case, crew, cluster, case.processes)
        for pairs in of_degrees.values():
            if number < arguments.rounds:
                shapes = list(dict.fromkeys(Shape.of(of) for of, _ in pairs))
                references.append(measure_references(case, crew, shapes, cores))
            left = [(of, row) for of, row in pairs if len(row["measured"]) < arguments.rounds * arguments.steps]
            for of, row in left:
                crew.call("build", row["label"], case.config, of)
                if "bytes" not in row and arguments.only != "steps":
                    row["bytes"] = max(crew.call("memory", row["label"]))
            for _, row in left:
                measure_steps(crew, row, row["label"], arguments.steps, cores)
            crew.call("close_all")
    found = quiet(layers)
    return (found.beside(quiet(crowded)) if crowded else found), References.joined(references)


def quiet(found: list[LayerTimes]) -> LayerTimes:
    """The mean of the faster half of repeated measurements: other load only ever makes one longer."""
    ordered = sorted(found, key=lambda each: sum(sum(row.blocks[False]) for row in each.rows.values()))
    return mean_layers(ordered[: max(1, len(ordered) // 2)])


def seconds_of(row: dict[str, Any]) -> float:
    """The lower quartile of the measured steps of a configuration."""
    return lower_quartile(row["measured"] or row["disturbed"])


def measure_bytes(case: Case, crew: Crew, rows: list[dict[str, Any]]) -> None:
    """Measure the bytes of all configurations."""
    for of, row in paired(case, rows):
        crew.call("build", row["label"], case.config, of)
        row["bytes"] = max(crew.call("memory", row["label"]))
        crew.call("close_all")


def measure_references(case: Case, crew: Crew, shapes: list[Shape], cores: int) -> References:
    """Measure the reference steps of some shapes, again where others used the cores."""
    for _ in range(_MOST_TRIES):
        answers = crew.call("references", case.config, case.batch, shapes)
        if others_part(answers, cores) < _QUIET:
            break
    found: References = answers[0]["found"]
    return found


def others_part(answers: list[dict[str, Any]], cores: int) -> float:
    """The part of the cores' time that others used."""
    whole = max(each["whole"] for each in answers)
    return (answers[0]["machine"] - sum(each["own"] for each in answers)) / (cores * whole)


def chosen_row(rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The row with the least predicted seconds, or the one that trial steps choose."""
    rows = distinct(rows)
    several = [row for row in rows if "trial" in row] if kind == "trials" else []
    if several:
        return several[trials.ranking([row["trial"] for row in several])[0]]
    kind = _predictions(kind)
    return min(rows, key=lambda row: float(row["predicted"][kind]))


def measure_best(
    case: Case, crew: Crew, cluster: Cluster, rows: list[dict[str, Any]], arguments: argparse.Namespace
) -> None:
    """Choose by trial steps, and measure what was chosen beside the fastest."""
    measure_trials(case, crew, rows)
    measure_finalists(case, crew, rows, arguments, cluster.measured.cores if cluster.measured else 1)


def measure_trials(case: Case, crew: Crew, rows: list[dict[str, Any]]) -> None:
    """Trial steps of the configurations that are predicted to be the fastest, as `pipeloom train --parallel auto`."""
    of_label = {label(of): of for of, _ in paired(case, rows)}
    for row in rows:
        row.pop("trial", None)
    best = sorted(distinct(rows), key=lambda row: float(row["predicted"][KINDS[0]]))
    predicted = [row["predicted"][KINDS[0]] for row in best]

    def run(number: int) -> list[float]:
        row = best[number]
        crew.call("build", row["label"], case.config, of_label[row["label"]])
        answers = crew.call("steps", row["label"], trials.WARM_UP, trials.STEPS)
        crew.call("close_all")
        return list(map(max, zip(*(each["steps"] for each in answers), strict=True)))

    for row, trial in zip(best, trials.measured(predicted, run, trials.tried(predicted)), strict=True):
        if trial:
            row["trial"] = trial


def distinct(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without those that repeat the order of another: with the same shape and the same prediction."""
    found = {(*_without_schedule(row["label"]), row["predicted"][KINDS[0]]): row for row in reversed(rows)}
    return list(found.values())[::-1]


def _without_schedule(name: str) -> list[str]:
    """The words of a label but for the schedule."""
    words = name.split()
    return [*words[:4], *words[5:]]


def measure_finalists(
    case: Case, crew: Crew, rows: list[dict[str, Any]], arguments: argparse.Namespace, cores: int
) -> None:
    """Measure the chosen configurations and the fastest ones once more, each with more steps, in turns.

    The fastest of many that were measured a few times each is often one that was lucky.
    """
    of_label = {label(of): of for of, _ in paired(case, rows)}
    chosen = {chosen_row(rows, kind)["label"] for kind in CHOICES}
    least = {row["label"] for row in sorted(distinct(rows), key=seconds_of)[:_FINALISTS]}
    for row in rows:
        row.pop("final", None)
    finalists = [row for row in rows if row["label"] in chosen | least]
    for row in finalists:
        row["final"] = {"measured": [], "disturbed": [], "others": []}
    for _ in range(_MOST_TRIES * arguments.rounds):
        for row in finalists:
            if len(row["final"]["measured"]) < arguments.rounds * arguments.final_steps:
                crew.call("build", row["label"], case.config, of_label[row["label"]])
                measure_steps(crew, row["final"], row["label"], arguments.final_steps, cores)
                crew.call("close_all")


def measure_steps(crew: Crew, row: dict[str, Any], name: str, count: int, cores: int) -> None:
    """Measure some steps of a configuration that is built, into a row."""
    answers = crew.call("steps", name, _WARM_UP, count)
    others = others_part(answers, cores)
    row["others"].append(others)
    key = "measured" if others < _QUIET else "disturbed"
    slowest = [max(each) for each in zip(*(answer["steps"] for answer in answers), strict=True)]
    row[key] += slowest


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a case shows: the chosen plan over the fastest one, and predicted over measured steps and bytes."""
    measured = [seconds_of(row) for row in rows]
    finals = {row["label"]: seconds_of(row["final"]) for row in rows if "final" in row}
    finals = finals or {row["label"]: seconds for row, seconds in zip(rows, measured, strict=True)}
    least = min(finals, key=lambda each: finals[each])
    shown: dict[str, Any] = {
        "fastest": least,
        "configurations": len(rows),
        "disturbed": sum(not row["measured"] for row in rows),
        "bytes": _spread([row["predicted_bytes"] / row["bytes"] for row in rows if "bytes" in row]),
    }
    for kind in CHOICES:
        predicted, chosen = [row["predicted"][_predictions(kind)] for row in rows], chosen_row(rows, kind)
        shown[kind] = {
            "chosen": chosen["label"],
            "over_fastest": finals.get(chosen["label"], seconds_of(chosen)) / finals[least],
            "ratios": _spread([a / b for a, b in zip(predicted, measured, strict=True)]),
        }
    return shown


def _predictions(choice: str) -> str:
    """The kind of predictions with which a plan is chosen."""
    return KINDS[0] if choice == "trials" else choice


def _spread(ratios: list[float]) -> list[float]:
    """The least, the median and the most, if there are any."""
    return [min(ratios), median(ratios), max(ratios)] if ratios else []


def tables(results: dict[str, Any]) -> Parts:
    header = ("case", "prediction", "chosen", "fastest", "chosen / fastest", "steps", "bytes")
    rows = []
    for name, of_case in results.items():
        shown = of_case["summary"]
        for kind in CHOICES:
            found = shown[kind]
            cells = found["chosen"], shown["fastest"], f"{found['over_fastest']:.3f}", _words(found["ratios"])
            rows.append((name, kind, *cells, _words(shown["bytes"])))
    return [
        *(f"{kind}: {_all(results, kind)}" for kind in CHOICES),
        *([_repeated_words(found)] if (found := measured_twice(results)) else []),
        "*steps*, *bytes*: predicted over measured: least, median, most of all configurations.",
        table(header, rows),
    ]


def _words(spread: list[float]) -> str:
    return " ".join(f"{each:.2f}" for each in spread)


def _all(results: dict[str, Any], kind: str) -> str:
    """All cases in one sentence."""
    near = sum(each["summary"][kind]["over_fastest"] <= _NEAR for each in results.values())
    ratios = _ratios(results, kind)
    return (
        f"chosen plan within 5 % of the fastest in {near} of {len(results)} cases; predicted / measured step "
        f"{median(ratios):.2f} in the median of {len(ratios)} configurations, {min(ratios):.2f} to {max(ratios):.2f}"
    )


def measured_twice(results: dict[str, Any]) -> list[float]:
    """Reference steps over other steps of the same configuration in the same rounds: a prediction is no closer."""
    found = []
    for case in CASES:
        if (of_case := results.get(case.name)) is None:
            continue
        references = References.from_mapping(of_case["references"])
        rows = {label(of): row for of, row in paired(case, of_case["rows"])}
        for shape, measured in references.seconds.items():
            for of in shape.steps(references.batch, case.config.layers, Precision("fp32")):
                if label(of) in rows and of.microbatch_size in measured:
                    found.append(lower_quartile(measured[of.microbatch_size]) / seconds_of(rows[label(of)]))
    return found


def _repeated_words(ratios: list[float]) -> str:
    return (
        f"The same configuration measured twice in the same rounds, as a reference step and as a configuration: "
        f"{min(ratios):.2f} to {max(ratios):.2f} of the other in {len(ratios)} pairs. No prediction can be closer."
    )


def _ratios(results: dict[str, Any], kind: str) -> list[float]:
    rows = [row for each in results.values() for row in each["rows"]]
    return [row["predicted"][_predictions(kind)] / seconds_of(row) for row in rows]


def write(
    path: Path, settings: dict[str, Any], machine: dict[str, Any], cluster: Cluster, known: dict[str, Any]
) -> None:
    """Save all cases so far, and print their tables."""
    results = {case.name: known[case.name] for case in CASES if case.name in known}
    if results:
        parts = tables(results)
        save(path, settings, machine, {"cluster": cluster.to_json(), "cases": results}, parts)
        print(markdown(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_local", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a configuration in a round")
    parser.add_argument("--final-steps", type=int, default=6, help="the same of a finalist")
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="their numbers")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), help="of pipelines")
    parser.add_argument("--again", action="store_true", help="measure cases that the output has already")
    parser.add_argument("--cluster", default="local", help="local, or a cluster file")
    parser.add_argument("--only", choices=("steps", "bytes", "best"), help="bytes, best: of saved cases")
    parser.add_argument("--predict", action="store_true", help="predict again what was measured; measure nothing")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no case begins after this many")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "plan_local.json")
    arguments = parser.parse_args()
    machine, cluster, start = environment(), find_cluster(arguments.cluster, "--cluster"), time.monotonic()
    settings = {"rounds": arguments.rounds, "steps": arguments.steps}
    saved = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"results": {"cases": {}}}
    for of_case in saved["results"]["cases"].values():
        of_case["summary"] = summary(of_case["rows"])
    known, wanted = saved["results"]["cases"], [CASES[number] for number in arguments.cases]
    wanted = [replace(case, schedules=tuple(arguments.schedules)) for case in wanted]
    missing = [case for case in wanted if arguments.again or case.name not in known]
    if arguments.only in ("bytes", "best"):
        machine, settings = saved["environment"], saved["settings"]
        missing = [case for case in wanted if case.name in known]
    if arguments.predict:
        machine, settings, missing = saved["environment"], saved["settings"], []
        cluster = parse_cluster(saved["results"]["cluster"])
        for case in (each for each in wanted if each.name in known):
            of_case = known[case.name]
            layers = LayerTimes.from_mapping(of_case["layers"])
            predict(case, cluster, layers, References.from_mapping(of_case["references"]), of_case["rows"])
            of_case["summary"] = summary(of_case["rows"])
    for processes in sorted({case.processes for case in missing}):
        with Crew(f"{processes} processes", processes, Trainer) as crew:
            for case in missing:
                if case.processes != processes or time.monotonic() - start > arguments.seconds:
                    continue
                if arguments.only in ("bytes", "best"):
                    if arguments.only == "bytes":
                        measure_bytes(case, crew, known[case.name]["rows"])
                    else:
                        measure_best(case, crew, cluster, known[case.name]["rows"], arguments)
                    known[case.name]["summary"] = summary(known[case.name]["rows"])
                else:
                    known[case.name] = measure(case, crew, cluster, arguments)
                write(arguments.output, settings, machine, cluster, known)
    write(arguments.output, settings, machine, cluster, known)


if __name__ == "__main__":
    main()
