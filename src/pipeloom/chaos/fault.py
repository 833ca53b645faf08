"""`Fault`: what is injected, where, and into which rank; and the kinds of faults. No torch."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, Self

from pipeloom.common.json_reader import parse_json

VARIABLE = "_PIPELOOM_CHAOS"  # variable: an `Order`, as JSON; ranks that find it inject its fault

Trigger = Literal["action", "file", "loading"]


class Kind(NamedTuple):
    """A kind of faults.

    Attributes:
        trigger: what the injector counts: actions, file operations of saves, or the start of loading a checkpoint.
        text: what it does.
        notice: a regular expression for lines in which a process tells of it.
    """

    trigger: Trigger
    text: str
    notice: str


_ENDED = r"^pipeloom: |Signal \d+ \(SIG|failed \(exitcode"
_HANGS = r"^pipeloom: (warning|error|rank|no progress)"
RECOVERS = ("recover-kill", "recover-all-kill")
ELASTIC = "elastic-kill"
BY_ITSELF = (*RECOVERS, ELASTIC)  # the kinds after which the run goes on without being started again
_REGROW_SECONDS = 0.5
KINDS: dict[str, Kind] = {
    "kill": Kind("action", "SIGKILL of a rank at an action", _ENDED),
    "recover-kill": Kind("action", "SIGKILL of a rank of a run with --recover", _ENDED),
    "recover-all-kill": Kind("action", "SIGKILL of all ranks of a run with --recover", _ENDED),
    ELASTIC: Kind("action", "SIGKILL of a rank of a run with --elastic", _ENDED),
    "save-kill": Kind("file", "SIGKILL of a rank during a save", _ENDED),
    "launcher-kill": Kind("action", "SIGKILL of the launcher or torchrun's agent", _ENDED),
    "stop": Kind("action", "SIGSTOP of a rank at an action", _HANGS),
    "loop": Kind("action", "a rank stays in Python at an action", _HANGS),
    "lock": Kind("action", "a C call holds a rank's interpreter lock", _HANGS),
    "slow": Kind("action", "the forwards of a rank become slower", "times slower"),
    "preempt": Kind("action", "SIGTERM or SIGUSR1 to a rank or its launcher", "pre-empted|without a checkpoint"),
    "full-disk": Kind(
        "file", "the disk is full within a file of a checkpoint", "cannot be written|not saved|too large"
    ),
    "flip": Kind("action", "SIGKILL, and a flipped bit in the newest checkpoint", "damaged"),
    "late-flip": Kind("loading", "SIGKILL, and a bit flipped as the run resumes", "damaged"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of one rank.

    Attributes:
        kind: a key of `KINDS`.
        rank: which rank it strikes.
        at: the number of the action or file operation, counted from 1 in the process; 0 for loading.
        parent: whether a signal goes to the rank's parent process.
        signal: of pre-emption: its number.
        delay_seconds: from the file operation to the kill.
        limit_bytes: of `full-disk`: how much of the file is written.
        times: of `slow`: how many times as long the forwards of the rank take.
        position: of flips: where in the file, as a fraction of its size.
        copy_steps: of kinds with --recover or --elastic: steps between copies of the state in memory.
    """

    kind: str
    rank: int
    at: int
    parent: bool = False
    signal: int = 0
    delay_seconds: float = 0.0
    limit_bytes: int = 0
    times: float = 1.0
    position: float = 0.0
    copy_steps: int = 0

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the run that it strikes."""
        copies = f"--copy_steps={self.copy_steps}"
        if self.kind == ELASTIC:
            return ("--elastic=true", copies, f"--regrow_seconds={_REGROW_SECONDS}")
        return ("--recover=true", copies) if self.kind in RECOVERS else ()

    @property
    def trigger(self) -> Trigger:
        """What the injector counts."""
        return KINDS[self.kind].trigger


@dataclass(frozen=True, slots=True)
class Order:
    """What the ranks of one attempt receive.

    Attributes:
        record: the file to which they append; what has struck has a file of the same name and ``.struck``.
        fault: what to inject; None: they only record.
    """

    record: str
    fault: Fault | None

    def to_json(self) -> str:
        """The value of `VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        row = parse_json(text)
        return cls(row["record"], None if row["fault"] is None else Fault(**row["fault"]))
