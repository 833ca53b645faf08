"""`pipeloom tune`: the number of micro-batches for which a step of `Pipe` is fastest, by experiment."""

import json
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeloom.cli.common.parser import Parser
from pipeloom.cli.common.planning import add_model_options, given_model, measured_model
from pipeloom.common.atomic_file import check_named, write_named
from pipeloom.common.quantities import seconds_text
from pipeloom.errors import InputError, PipeloomError, RunError, folded, one_line
from pipeloom.report.chart_picture import chart_picture
from pipeloom.report.line_chart import Series

if TYPE_CHECKING:
    from pipeloom.pipe.tuning import ChunkTime

_COLUMNS = 48  # of the curve in the terminal


def main(argv: Sequence[str]) -> int:
    """Measure and show; returns the exit code."""
    given = _parser().parse_args(list(argv)).as_dict()
    numbers = _integers("--chunks", given["chunks"])
    counts = given["balance"]
    balance: Any = counts if counts in ("time", "size", None) else _integers("--balance", counts)
    devices = [word for word in given["devices"].split(",") if word]
    if given["module"] is not None and (sizes := given_model(given)):
        names = ", ".join(f"--{name}" for name in sizes)
        raise InputError(f"--module {given['module']}: does not work with {names}. Remove one.")
    if given["batch"] is not None and given["batch"] < 1:
        raise InputError(f"--batch={given['batch']}: must be at least 1.")
    check_named({"--svg": given["svg"]})
    from pipeloom.pipe.tuning import measure_chunks

    model, inputs, loss_fn = _gpt(given) if given["module"] is None else _of_user(given["module"], given["batch"])
    with _failing("a step"):
        times = measure_chunks(
            model,
            inputs,
            numbers,
            loss_fn=loss_fn,
            rounds=given["rounds"],
            balance=balance,
            devices=devices,
            checkpoint=given["checkpoint"],
        )
    best = min(times, key=lambda each: each.median)
    if given["svg"] is not None:
        write_named("--svg", given["svg"], _picture(times))
    if given["json"]:
        print(json.dumps({"chunks": best.chunks, "times": [each._asdict() for each in times]}))
        return 0
    print("\n".join(_lines(times)))
    print(f"fastest: chunks={best.chunks}, {seconds_text(best.median)} per step")
    return 0


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turns an error of the user's code inside the block into one line, with the partition where it arose."""
    try:
        yield
    except PipeloomError:
        raise
    except Exception as error:
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        raise RunError(f"{what} raised {one_line(error)}{where}") from error


def _parser() -> Parser:
    parser = Parser(
        prog="pipeloom tune",
        description="Find the number of micro-batches (chunks) for which a training step of `pl.Pipe` is fastest, by "
        "experiment.\nThe model is that of --module, or a GPT (--model.*).",
        examples="""
            pipeloom tune --chunks 1,2,4,8 --module mymodel:build --balance 3,3
            pipeloom tune --chunks --devices cuda:0,cuda:1 --balance time --batch 64 --svg chunks.svg
            pipeloom tune --chunks 1,4 --model.layers 2 --model.width 64 --model.heads 2 --batch 8 --rounds 3
        """,
    )
    option = parser.add_argument
    numbers = "numbers of micro-batches to compare, such as 1,2,4 (default: powers of two up to the batch size)"
    option("--chunks", type=str, nargs="?", metavar="N,..", help=numbers)
    module = "function that returns the model (an nn.Sequential) and a batch, and perhaps a loss function"
    option("--module", type=str, metavar="MODULE:FUNCTION", help=module)
    option("--batch", type=int | None, help="samples per batch (default: the function's, or 16)")
    option("--devices", type=str, default="cpu,cpu", metavar="NAME,..", help="one device per partition")
    balance = "layers per partition, such as 3,3, or time, or size (default: by parameter sizes)"
    option("--balance", type=str, metavar="N,..", help=balance)
    modes = Literal["never", "except_last", "always"]
    option("--checkpoint", type=modes, default="never", help="which micro-batches recompute their activations")
    option("--rounds", type=int, default=5, help="measured steps per number")
    option("--svg", type=str, metavar="FILE", help="SVG file to write with the curve")
    option("--json", action="store_true", help="output as one JSON object")
    add_model_options(parser)
    return parser


def _integers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise InputError(f"{option}={text}: must be integers, separated by commas, such as 1,2,4.") from error


def _of_user(name: str, batch: int | None) -> tuple[Any, Any, Any]:
    """Model, batch and loss function of ``module:function``; the module may be in the working directory."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise InputError(f"--module={name}: must be MODULE:FUNCTION, such as mymodel:build.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"--module={name}: {one_line(error)}. Run the command where it can be imported.") from error
    finally:
        sys.path.pop(0)
    with _failing(f"--module={name}: the function"):
        found = function()
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise InputError(f"--module={name}: the function returned {folded(found)}: must be model and batch.")
    from pipeloom.pipe.micro_batches import check_value

    model, inputs, *more = found
    if batch is not None:
        check_value(inputs, f"--module={name}: the batch")
        inputs = tuple(each[:batch] for each in inputs) if isinstance(inputs, tuple) else inputs[:batch]
    return model, inputs, more[0] if more else None


def _gpt(given: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A GPT as a chain of layers, a batch of random tokens, and the loss of their successors."""
    from collections import OrderedDict

    import torch
    from torch import nn

    from pipeloom.models import GPT, init_parameters, loss_fn

    config = measured_model(given)
    gpt = GPT(config)
    init_parameters(gpt, seed=0)
    layers = [("embedding", gpt.embedding), *((f"block {i}", block) for i, block in enumerate(gpt.blocks))]
    chain = nn.Sequential(OrderedDict([*layers, ("norm", gpt.norm), ("head", gpt.head)]))
    batch = 16 if given["batch"] is None else given["batch"]
    tokens = torch.randint(config.vocabulary_size, (batch, config.sequence_length + 1))
    return chain, tokens[:, :-1], lambda output: loss_fn(output, tokens[:, 1:].to(output.device))


def _lines(times: "Sequence[ChunkTime]") -> list[str]:
    """One row per number, with a bar as long as its time."""
    longest = max(each.median for each in times)
    rows = ["chunks  ms per step (quartiles)"]
    for each in times:
        bar = "#" * max(1, round(_COLUMNS * each.median / longest))
        numbers = f"{each.median * 1e3:.1f} ({each.low * 1e3:.1f} to {each.high * 1e3:.1f})"
        rows.append(f"{each.chunks:>6}  {numbers:<24} {bar}")
    return rows


def _picture(times: "Sequence[ChunkTime]") -> str:
    ordered = sorted(times)
    lines = [
        Series(label="median", points=[(each.chunks, each.median * 1e3) for each in ordered], marks=True),
        Series(label="quartiles", points=[(each.chunks, each.low * 1e3) for each in ordered], style="c"),
        Series(label="", points=[(each.chunks, each.high * 1e3) for each in ordered], style="c"),
    ]
    return chart_picture(lines, title="ms per step by number of micro-batches", x_label="chunks")
