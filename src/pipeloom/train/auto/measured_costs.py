"""`measured_costs`: what the layers of a run's model take on this machine, and what they take beside each other."""

from collections.abc import Callable
from math import inf

from pipeloom.common.atomic_file import write_whole
from pipeloom.ir import DataStrategy
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster, parse_cluster
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.local.layer_times import LayerTimes, mean_layers
from pipeloom.plan.local.references import MOST_SAMPLES, Shape
from pipeloom.plan.local.saved import local_path, notices
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.opening import run_tokenizer
from pipeloom.train.machine.layers import measure_layers
from pipeloom.train.machine.measure import measure_machine
from pipeloom.train.machine.reference_steps import measure_references
from pipeloom.train.process_group import Group

_CROWDED = 2  # micro-batch sizes that more processes than cores measure at once


def measured_costs(asked: TrainConfig, group: Group, say: Callable[[str], None]) -> tuple[CostModel, list[str]]:
    """Costs of the model on this machine, the same on every process; a collective call.

    The machine itself is measured once, and kept for later runs.

    Args:
        asked: the run, with ``parallel.auto`` or schedule ``auto``.
        group: its processes.
        say: shows a line while this takes its time.

    Returns:
        The costs, and lines about a machine that was measured just now.
    """
    said, text = list[str](), ""
    if group.rank == 0:
        cluster = _saved()
        if cluster is None:
            say("planning: measuring this machine, for a minute or two; it is kept for later runs")
            cluster, unsaved = _measured_now()
            said += notices(cluster)
            if unsaved is not None:
                say(f"planning: {unsaved}. The measurement is not kept; later runs measure again.")
        text = cluster.to_json()
    say("planning: measuring the layers of the model")
    cluster = parse_cluster(group.gather_json(text)[0]).beside(group.size)
    rates, measured = cluster.rates, cluster.measured
    assert rates is not None
    assert measured is not None
    sizes = asked.gpt(run_tokenizer(asked).vocabulary_size)
    samples, shapes = _measured_sizes(asked)

    def measured_by(processes: int, samples: list[int]) -> LayerTimes:
        mine: LayerTimes | None = None
        if group.rank < processes:  # others wait
            mine = measure_layers(sizes, samples, precision=asked.number_format, rates=rates)
        every = group.gather_json(None if mine is None else mine.to_mapping())
        return mean_layers([LayerTimes.from_mapping(each) for each in every if each is not None])

    layers = measured_by(measured.cores, samples)
    if group.size > measured.cores:
        layers = layers.beside(measured_by(group.size, samples[:_CROWDED]))
    costs = CostModel(model=Architecture.of_gpt(sizes), cluster=cluster, measured=layers)
    if group.size > 1:
        precision, memory = asked.number_format, cluster.device.memory_bytes or inf

        def fits(of: Configuration, plain: CostModel = costs) -> bool:
            return group.size * max(plain.peak_bytes(of)) <= memory

        references = measure_references(sizes, asked.batch.size, precision=precision, fits=fits, shapes=shapes)
        costs = costs.corrected_by(references, precision)
    return costs, said


def _measured_sizes(asked: TrainConfig) -> tuple[list[int], list[Shape] | None]:
    """Samples per micro-batch of the measured layers, and shapes of the reference steps; None: all."""
    if asked.parallel.auto:
        return [1 << power for power in range(MOST_SAMPLES.bit_length()) if 1 << power <= asked.batch.size], None
    parallel, sharded = asked.parallel, DataStrategy(asked.parallel.data_strategy).shards_optimizer
    shape = Shape(parallel.pipeline, parallel.data, parallel.tensor, parallel.data > 1 and sharded)
    plain = parallel.tensor == 1 or (parallel.tensor_layout == "1d" and not asked.model.experts)
    shapes = [*shape.with_schedules] if plain and parallel.context == 1 else []
    return [min(asked.microbatch_size, MOST_SAMPLES)], shapes


def _saved() -> Cluster | None:
    """The measurement of this machine; None: there is none that fits, or its file is damaged."""
    try:
        cluster = parse_cluster(local_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cluster if len(notices(cluster)) == 1 else None


def _measured_now() -> tuple[Cluster, str | None]:
    """Measure this machine, and save that; and why it cannot be saved."""
    cluster, path = measure_machine(), local_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, cluster.to_json() + "\n")
    except OSError as error:
        return cluster, f"{path}: {error.strerror or error}"
    return cluster, None
