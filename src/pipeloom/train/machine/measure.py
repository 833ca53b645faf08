"""`measure_machine`: rates of this machine with different numbers of processes side by side, as a cluster. No torch."""

import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeloom.common.cores import usable_cores
from pipeloom.common.json_reader import Entry
from pipeloom.errors import RunError
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster, Device, NodeLinks, NodeNetwork
from pipeloom.plan.local.measured import Measured, Rates
from pipeloom.plan.local.saved import LOCAL, torch_version
from pipeloom.plan.stage_times import StageTimes
from pipeloom.processes import launcher

SMALL = GPTConfig(vocabulary_size=16, layers=5, width=16, heads=1, sequence_length=8)
"""A GPT whose kernels take next to nothing: what its layers take is Python and autograd."""


def measure_machine(*, tiny: bool = False) -> Cluster:
    """Measure this machine with 1 process, with one per core, and with two per core.

    Args:
        tiny: whether a few small sizes are enough, for tests.

    Raises:
        RunError: a process failed; its error was printed.
    """
    cores = usable_cores()
    rates: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="pipeloom-measure-") as folder:
        path = Path(folder) / "rates.json"
        for count in sorted({1, cores, 2 * cores}):
            names = [f"process {rank} of {count}" for rank in range(count)]
            words = ["-m", "pipeloom.train.machine", str(path), "tiny" if tiny else "full"]
            if launcher.launch(names, words):
                raise RunError("the measurement failed. Run `pipeloom doctor`, and see the error above.")
            rates.append(json.loads(path.read_text(encoding="utf-8")))
    probes = {each["processes"]: each.pop("probe") for each in rates}
    for each in rates:
        if each["processes"] > cores:
            each["seconds"]["crowding"] = max(1.0, probes[each["processes"]] / probes[max(1, cores)])
    found = {
        "version": 1,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": platform.node(),
        "cores": cores,
        "torch": torch_version(),
        "rates": rates,
    }
    return _cluster(Measured.read(Entry(found, "the measurement")))


def _cluster(measured: Measured) -> Cluster:
    """The figures of a data sheet that follow from the tables."""
    single, beside = measured.rates[0], measured.of(max(2, measured.cores))
    product = max(2 * a * b * c / seconds for a, b, c, seconds in beside.products.get("fp32", single.products["fp32"]))
    size, seconds = max(beside.curves.get("elementwise", single.curves["elementwise"]))
    several = next((each for each in measured.rates if "message" in each.curves), None)
    latency, (length, transfer) = 0.0, (1.0, 1e-9)
    if several is not None:
        latency, (length, transfer) = several.curves["message"][0][1], several.curves["message"][-1]
    rate = length / max(1e-9, transfer - latency)
    cluster = Cluster(
        name=LOCAL,
        devices_per_node=max(2 * measured.cores, 2),
        device=Device(
            name=f"{measured.machine}, {measured.cores} cores",
            operations_per_second=product,
            memory_bytes_per_second=size / seconds,
            launch_seconds=single.seconds["kernel"],
            memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        ),
        inside_node=NodeLinks(bytes_per_second=rate, pair_bytes_per_second=rate, latency_seconds=latency),
        between_nodes=NodeNetwork(bytes_per_second=rate, latency_seconds=latency),
        efficiency=1.0,
        measured=measured,
    )
    return replace(cluster, measured=replace(measured, rates=tuple(beyond_kernels(cluster, measured.rates))))


def beyond_kernels(cluster: Cluster, every: Sequence[Rates]) -> Iterator[Rates]:
    """The rates, with the seconds of a small block beyond those of its kernels in place of all."""
    model = Architecture.of_gpt(SMALL)
    for rates in every:
        seconds = dict(rates.seconds)
        plain = {name: value for name, value in seconds.items() if not name.startswith("block")}
        if "block forward" in seconds:
            assert cluster.measured is not None
            alone = replace(cluster, measured=replace(cluster.measured, rates=(replace(rates, seconds=plain),)))
            times = StageTimes(model=model, inside=InsideStage(), cluster=alone, samples=1, element=4)
            forward, inputs, weights = times.block()
            seconds["block forward"] = max(0.0, seconds["block forward"] - forward)
            seconds["block backward"] = max(0.0, seconds["block backward"] - inputs - weights)
        yield replace(rates, seconds=seconds)
