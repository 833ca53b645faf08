"""``pipeloom memory --optimizers``: bytes per parameter of every optimizer, as a table and as JSON."""

import json
from dataclasses import asdict
from typing import Any, get_args, get_type_hints

from pipeloom.common.quantities import bytes_text, number_text, table_lines
from pipeloom.errors import InputError
from pipeloom.plan.memory import STATES, OptimizerRow, optimizer_rows
from pipeloom.train.config.memory import planned_model, planned_program
from pipeloom.train.config.schedule import make_schedule
from pipeloom.train.config.sections import OptimizerConfig
from pipeloom.train.config.train_config import TrainConfig

TRAINED = get_args(get_type_hints(OptimizerConfig)["name"])  # optimizers that `pipeloom train` offers
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
    rows = optimizer_rows(program, planned_model(config, vocabulary_size, schedule.num_stages))
    if as_json:
        answer = [
            {**asdict(row), "held": row.held, "largest_rank": row.largest, "trained": row.optimizer in TRAINED}
            for row in rows
        ]
        print(json.dumps({"optimizers": answer}, allow_nan=False))
        return
    table = [["optimizer", "keeps", *_COLUMNS.values(), "bytes per parameter", "by formula", "largest rank", "source"]]
    table += [_cells(row) for row in rows]
    print("\n".join(table_lines(table, left=(0, 1, len(table[0]) - 1))))
    print(f"{_where(config)}, between backward and update")
    missing = [row.optimizer for row in rows if row.optimizer not in TRAINED]
    print(f"formula alone, not offered for training: {', '.join(missing)}")


def _cells(row: OptimizerRow) -> list[str]:
    states, source = STATES[row.optimizer]
    held = row.held
    total, formula = sum(held.values()), sum(row.formula.values())
    size = bytes_text(sum(row.ranks[row.largest].values()))
    numbers = [number_text(held[kind]) for kind in _COLUMNS]
    return [row.optimizer, states, *numbers, number_text(total), number_text(formula), size, source]


def _where(config: TrainConfig) -> str:
    """``bytes per parameter of the largest rank of pipeline 2, data 8 (zero1)``."""
    parallel = config.parallel
    degrees = {name: getattr(parallel, name) for name in ("pipeline", "data", "tensor", "context", "expert")}
    words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    words = [f"{word} ({parallel.data_strategy})" if word.startswith("data") else word for word in words]
    ranks = ", ".join(words) or "one process"
    return f"bytes per parameter on the largest rank of {ranks}, {config.precision.dtype}"
