"""What is hurt: how each system is started, where its checkpoints are, and how two of its runs are compared."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from pipeloom.chaos.comparison import EQUAL, compare
from pipeloom.train.checkpoint.directory import list_checkpoints
from pipeloom.train.checkpoint.manifest import verify

PEER = Path(__file__).with_name("peer.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SIZES = {"layers": 4, "width": 64, "heads": 4, "sequence_length": 64, "batch": 16, "microbatches": 4}


class System(ABC):
    """A way to train.

    Args:
        name: in tables.
        text: what is trained on.
        steps, save_steps: of a run, and between its checkpoints.
    """

    def __init__(self, name: str, text: Path, steps: int, save_steps: int) -> None:
        self.name, self.text, self.steps, self.save_steps = name, text, steps, save_steps

    @abstractmethod
    def command(self, output_dir: Path) -> list[str]:
        """Starts the run, and goes on with it after a fault."""

    @abstractmethod
    def saving(self, output_dir: Path, step: int) -> bool:
        """Whether the save of a step has begun."""

    @abstractmethod
    def complete(self, output_dir: Path) -> dict[int, Path]:
        """The checkpoints from which a run would start, by step."""

    @abstractmethod
    def tensor_files(self, checkpoint: Path) -> Iterator[Path]:
        """Those that damage may strike."""

    @abstractmethod
    def read(self, checkpoint: Path) -> dict[str, str]:
        """The hash of each tensor or file of a checkpoint, as a run would read it; raises where the run would."""

    @abstractmethod
    def difference(self, output_dir: Path, reference: Path) -> str:
        """How losses and the final state differ from those of the unhurt run; empty: in no bit."""


@final
class Torch(System):
    """`peer.py` under torchrun.

    Args:
        background: whether it saves with `async_save`.
        own_store: whether each start of the ranks has a store of its own, which is not torchrun's default.
    """

    def __init__(self, *arguments: Any, background: bool = False, own_store: bool = False) -> None:
        super().__init__(*arguments)
        self._background = background
        self._variables = [f"{OWN_STORE}=1"] * own_store

    def command(self, output_dir: Path) -> list[str]:
        sizes = {**SIZES, "steps": self.steps, "save_steps": self.save_steps}
        words = [f"--{name}={value}" for name, value in sizes.items()] + ["--background"] * self._background
        start = ["env", *self._variables, sys.executable, *TORCHRUN]
        return [*start, str(PEER), f"--output_dir={output_dir}", f"--text={self.text}", *words]

    def saving(self, output_dir: Path, step: int) -> bool:
        return (output_dir / f"step-{step}").exists()

    def complete(self, output_dir: Path) -> dict[int, Path]:
        found = (path.parent for path in output_dir.glob("step-*/.metadata"))
        return {int(path.name.removeprefix("step-")): path for path in found}

    def tensor_files(self, checkpoint: Path) -> Iterator[Path]:
        return checkpoint.glob("*.distcp")

    def read(self, checkpoint: Path) -> dict[str, str]:
        with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch:
            file = Path(scratch, "whole.pt")
            dcp_to_torch_save(checkpoint, file)
            return dict(_leaves(torch.load(file, weights_only=True), ""))

    def difference(self, output_dir: Path, reference: Path) -> str:
        wanted = dict(_rows(reference))
        apart = [step for step, row in _rows(output_dir) if row != wanted[step]]
        found = [self.read(self.complete(each)[self.steps]) for each in (output_dir, reference)]
        names = [name for name, value in found[1].items() if found[0].get(name) != value]
        losses = f"losses from step {min(apart)}" if apart else ""
        return ", ".join(filter(None, (losses, f"{len(names)} of {len(found[1])} tensors" if names else "")))


@final
class Pipeloom(System):
    """`pipeloom train`.

    Args:
        torchrun: whether torchrun starts it, or its own launcher.
        recover: whether it runs with ``--recover``.
    """

    def __init__(self, *arguments: Any, torchrun: bool = False, recover: bool = False) -> None:
        super().__init__(*arguments)
        self._torchrun, self._recover = torchrun, recover

    def command(self, output_dir: Path) -> list[str]:
        options = {
            "output_dir": output_dir, "data.path": self.text, "steps": self.steps, "save_steps": self.save_steps,
            "save_total_limit": "null", "eval_steps": 0, "sample_tokens": 0, "schedule": "1f1b", "model.dropout": 0.1,
            "resume_from_checkpoint": "auto",
        }  # fmt: skip
        options |= {f"{'batch' if 'batch' in k else 'model'}.{k}": v for k, v in SIZES.items() if k != "batch"}
        options["batch.size"] = SIZES["batch"]
        if self._recover:
            options |= {"recover": "true", "copy_steps": 2}
        words = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, *(TORCHRUN if self._torchrun else ()), "-m", "pipeloom", "train", *words]

    def saving(self, output_dir: Path, step: int) -> bool:
        return any(output_dir.glob(f".checkpoint-{step}.partial-*")) or (output_dir / f"checkpoint-{step}").exists()

    def complete(self, output_dir: Path) -> dict[int, Path]:
        if not output_dir.exists():
            return {}
        return {entry.step: entry.path for entry in list_checkpoints(output_dir) if entry.complete}

    def tensor_files(self, checkpoint: Path) -> Iterator[Path]:
        return checkpoint.glob("*.safetensors")

    def read(self, checkpoint: Path) -> dict[str, str]:
        return {name: record.sha256 for name, record in verify(checkpoint).files.items()}

    def difference(self, output_dir: Path, reference: Path) -> str:
        outcome = compare(output_dir, reference)._asdict()
        return ", ".join(f"{name}: {text}" for name, text in outcome.items() if text != EQUAL)


def systems(text: Path, steps: int, save_steps: int) -> dict[str, System]:
    """All of them, by name."""
    common = (text, steps, save_steps)
    found: list[System] = [
        Torch("torchrun, DCP `save`", *common),
        Torch("torchrun with own stores, DCP `save`", *common, own_store=True),
        Torch("torchrun, DCP `async_save`", *common, background=True),
        Pipeloom("torchrun, pipeloom", *common, torchrun=True),
        Pipeloom("pipeloom", *common),
        Pipeloom("pipeloom `--recover`", *common, recover=True),
    ]
    return {system.name: system for system in found}


def _rows(output_dir: Path) -> Iterator[tuple[int, float]]:
    for line in (output_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield row["step"], row["loss"]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, f"{name}/{key}")
    elif isinstance(value, torch.Tensor):
        yield name, hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
    else:
        yield name, re.sub(r"\s+", " ", repr(value))
