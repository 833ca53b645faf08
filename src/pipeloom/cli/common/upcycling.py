"""``pipeloom checkpoint convert --upcycle``: its options and its output."""

from pathlib import Path
from typing import Any

from pipeloom.cli.common.parser import Parser
from pipeloom.cli.common.planning import train_command
from pipeloom.cli.common.train_options import difference
from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.common.quantities import counted, number_text
from pipeloom.errors import InputError
from pipeloom.models.experts.settings import ROUTERS, ExpertSettings
from pipeloom.train.config.train_config import TrainConfig

_SETTINGS = ("experts_every", "router", "top_k", "capacity_factor")


def add_upcycle_options(parser: Parser) -> None:
    """Add them to the parser; options that are not given are None."""
    option = parser.add_argument
    option("--upcycle", type=int, default=None, metavar="E", help="a mixture whose E experts are copies of the MLP")
    option("--experts_every", type=int, default=None, metavar="K", help="block i has experts if K divides i + 1")
    option("--router", choices=tuple(ROUTERS), default=None, help="router (default: topk)")
    option("--top_k", type=int, default=None, metavar="K", help="experts per token (default: the router's)")
    option("--capacity_factor", type=float, default=None, metavar="X", help="capacity (default: the router's)")
    option("--optimizer", choices=("copy", "drop"), default=None, help="optimizer states (default: copy)")
    option("--seed", type=int, default=None, help="seed of the routers (default: 0)")


def check_no_upcycling(options: Any) -> None:
    """Raises InputError for an option that only a mixture has."""
    for name in (*_SETTINGS, "optimizer", "seed"):
        if getattr(options, name) is not None:
            raise InputError(f"--{name} {getattr(options, name)}: has no effect without --upcycle. Add --upcycle 8.")


def print_upcycled(options: Any) -> int:
    """Write the mixture, and print what it is."""
    if options.ranks is not None or options.single:
        name = "--single" if options.single else f"--ranks {options.ranks}"
        raise InputError(f"{name}: does not work with --upcycle, which writes a checkpoint. Remove it.")
    from pipeloom.train.upcycle import upcycle

    found = upcycle(
        Path(options.dir),
        Path(options.out),
        experts=options.upcycle,
        optimizer=options.optimizer or "copy",
        seed=options.seed or 0,
        key=CheckpointKey.read(options.checkpoint_key_file),
        **{name: value for name in _SETTINGS if (value := getattr(options, name)) is not None},
    )
    mixture = found.mixture
    print(
        f"{found.path}: {counted(len(found.blocks), 'block')} with {mixture.experts} experts, "
        f"{number_text(found.dense.num_parameters)} -> {number_text(mixture.num_parameters)} parameters"
    )
    print(f"experts equal the MLP: outputs differ by at most {found.largest_difference:.1e} of the largest, in float64")
    if ExpertSettings.of(**mixture.expert_settings).capacity_factor is not None:
        print("tokens over capacity are dropped, so the first loss of a run differs where there are any")
    usual = TrainConfig().gpt_sizes
    changed = difference({name: getattr(mixture, name) for name in usual}, usual)
    chosen = {"output_dir": options.out, "resume_from_checkpoint": "latest"}
    if options.checkpoint_key_file is not None:
        chosen["checkpoint_key_file"] = options.checkpoint_key_file
    chosen |= {f"model.{name}": value for name, value in changed.items()}
    print(f"train it: {train_command(chosen)}")
    return 0
