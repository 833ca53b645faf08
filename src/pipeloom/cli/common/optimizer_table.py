"""``pipeloom memory --optimizers``: bytes per parameter of every optimizer, as a table and as JSON."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args, get_type_hints

from pipeloom.common.quantities import bytes_text, number_text, table_lines
from pipeloom.errors import InputError
from pipeloom.parallel.options import axis_of
from pipeloom.plan.memory import STATES, MemoryModel, OptimizerRow, num_parameters, optimizer_rows
from pipeloom.train.config.memory import planned_model, planned_program
from pipeloom.train.config.rules.settings import check_optimizer
from pipeloom.train.config.schedule import make_schedule
from pipeloom.train.config.sections import OptimizerConfig
from pipeloom.train.config.train_config import TrainConfig

TRAINED = get_args(get_type_hints(OptimizerConfig)["name"])  # optimizers that `pipeloom train` offers
_LIBRARIES = {"adamw-8bit": ("bitsandbytes", "torchao")}  # that have optimizers which are listed only
_COLUMNS = {"parameters": "parameters", "masters": "masters", "gradients": "gradients", "optimizer": "states"}


def check_optimizers_alone(options: Any) -> None:
    """Raises InputError for options that say something else than what all optimizers hold."""
    for name in ("out", "costs", "cluster", "run"):
        if getattr(options, name) is not None:
            raise InputError(f"--{name} {getattr(options, name)}: has no effect with --optimizers. Remove one of them.")
    if options.memory.cap is not None:
        raise InputError(
            f"--memory.cap {options.memory.cap}: has no effect with --optimizers, which counts no activations. Remove "
            "one of them."
        )


def print_optimizers(config: TrainConfig, vocabulary_size: int, *, as_json: bool) -> None:
    """Print what each optimizer holds between backward and update on the largest rank, and what the formulas say."""
    schedule = make_schedule(config)
    program = planned_program(config, schedule)
    model = planned_model(config, vocabulary_size, schedule.num_stages)
    rows = optimizer_rows(program, model)
    measured = _measured(config, model)
    notes = {row.optimizer: note for row in rows if (note := _listed_only(config, row.optimizer)) is not None}
    if as_json:
        answer = [
            {
                **asdict(row),
                "held": row.held,
                "largest_rank": row.largest,
                "trained": row.optimizer not in notes,
                "note": notes.get(row.optimizer),
                "measured_state_bytes": measured.get(row.optimizer),
            }
            for row in rows
        ]
        print(json.dumps({"optimizers": answer}, allow_nan=False))
        return
    print("\n".join([*_lines(config, rows, measured), *notes.values()]))


def _measured(config: TrainConfig, model: MemoryModel) -> dict[str, float]:
    """State bytes per parameter of every optimizer that trains, after a step on the model's unsharded parameters."""
    from pipeloom.train.machine.optimizer_states import state_bytes

    layers = [layer for stage in model.stages for layer in stage]
    shapes = {name: shape for layer in layers for name, shape in layer.parameters.items()}
    options = {name: config.changed("optimizer", name=name).optimizer for name in STATES if name in TRAINED}
    return {name: state_bytes(each, shapes) / num_parameters(layers) for name, each in options.items()}


def _lines(config: TrainConfig, rows: Sequence[OptimizerRow], measured: Mapping[str, float]) -> list[str]:
    head = ["optimizer", "keeps", *_COLUMNS.values(), "bytes per parameter", "by formula", "largest rank"]
    table = [[*head, "unsharded states", "measured", "source"]]
    for row in rows:
        keeps, source = STATES[row.optimizer]
        held = row.held
        numbers = [number_text(each) for each in (*(held[kind] for kind in _COLUMNS), sum(held.values()))]
        size = bytes_text(sum(row.ranks[row.largest].values()))
        own = number_text(measured[row.optimizer]) if row.optimizer in measured else "-"
        states = number_text(4 * row.state_numbers)
        formula = number_text(sum(row.formula.values()))
        table.append([row.optimizer, keeps, *numbers, formula, size, states, own, source])
    lines = table_lines(table, left=(0, 1, len(table[0]) - 1))
    lines.append(f"{_where(config)}, between backward and update")
    lines.append("measured: states of the optimizer itself after a step, per parameter, without ZeRO")
    return lines


def _listed_only(config: TrainConfig, optimizer: str) -> str | None:
    """Why `pipeloom train` does not offer an optimizer with this configuration; None if it does."""
    if optimizer not in TRAINED:
        libraries = _LIBRARIES[optimizer]
        there = [name for name in libraries if importlib.util.find_spec(name) is not None]
        none = f"neither {' nor '.join(libraries)}, which have it, is installed"
        found = f"{', '.join(there)} is installed" if there else none
        return f"{optimizer}: formula alone, listed only: `pipeloom train` does not offer it; {found}"
    try:
        chosen = config.changed("optimizer", name=optimizer)
        check_optimizer(chosen)
        axis_of(chosen.data_parallel, chosen.number_format, chosen.parameter_replicas)
    except InputError as error:
        return f"{optimizer}: listed only: {error}"
    return None


def _where(config: TrainConfig) -> str:
    """``bytes per parameter of the largest rank of pipeline 2, data 8 (zero1)``."""
    parallel = config.parallel
    degrees = {name: getattr(parallel, name) for name in ("pipeline", "data", "tensor", "context", "expert")}
    words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    words = [f"{word} ({parallel.data_strategy})" if word.startswith("data") else word for word in words]
    ranks = ", ".join(words) or "one process"
    return f"bytes per parameter on the largest rank of {ranks}, {config.precision.dtype}"
