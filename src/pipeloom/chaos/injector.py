"""`Injector`: in a rank of a fault campaign, counts actions and file operations, and strikes at one of them."""

import ctypes
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pipeloom.chaos.fault import Fault, Order
from pipeloom.chaos.flip import flip_bit
from pipeloom.common.process_place import children
from pipeloom.processes.black_box import ActionObserver, BlackBox
from pipeloom.processes.launcher import Membership
from pipeloom.processes.launching.fork_server import FORKED_BY

_IN_CHECKPOINT = re.compile(r"/\.?checkpoint-\d+[^/]*(/[^/]+)?$")
_CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"})
_FOREVER_SECONDS = 3600
_FULL_SECONDS, _LONGEST_FULL_SECONDS = 0.05, 2.0  # how long a disk is full: after it was met, and at most


def inject(member: Membership, order: str) -> None:
    """Let `member`'s process record its actions, phases and file operations, and inject the fault of the order."""
    told = Order.from_json(order)
    injector = Injector(member.black_box, member.rank, Path(told.record), told.fault)
    member.black_box.observer = injector
    sys.addaudithook(injector.audit)


class Injector(ActionObserver):
    """The observer of a rank's black box.

    Args:
        black_box: of the rank; actions are still noted in it.
        rank: of this process.
        record: the file to which a line of JSON is appended for each phase, file operation and strike.
        fault: what to inject if it is of this rank.
    """

    def __init__(self, black_box: BlackBox, rank: int, record: Path, fault: Fault | None) -> None:
        super().__init__()
        self._box, self._rank, self._record = black_box, rank, record
        self._fault = fault if fault is not None and fault.rank == rank else None
        trigger = self._fault.trigger if self._fault else None
        self._action_at = self._fault.at if self._fault and trigger == "action" else 0
        self._file_at = self._fault.at if self._fault and trigger == "file" else 0
        self._loads = trigger == "loading"
        self._actions = self._files = 0
        self._limited = False
        self._loading = Path()
        # Of every rank: whether a slow one stands out depends on the others too.
        self._forwards = Forwards() if fault is not None and fault.kind == "slow" else None

    def begins(self, action: str) -> None:
        self._box.action, self._box.clock = action, time.perf_counter()
        self._actions += 1
        if self._actions == self._action_at:
            self._strike(f"action {action}")

    def enters(self, phase: str) -> None:
        row = {"phase": phase, "actions": self._actions, "files": self._files, "steps": int(self._box.steps)}
        if self._forwards is not None:
            row["forward_seconds"] = self._forwards.seconds()
        self._write(row)
        if self._loads and phase.startswith("loading "):
            self._loading = Path(phase.removeprefix("loading "))
            self._strike("before it reads")

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's audit hook: counts what changes checkpoints, before it happens."""
        if event == "open":
            path, mode = arguments[0], arguments[1]
            if not isinstance(mode, str) or "x" not in mode:
                return
        elif event in _CHANGES:
            path = arguments[1 if event == "os.rename" else 0]
        else:
            return
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if not _IN_CHECKPOINT.search(text):
            return
        self._lift()
        self._files += 1
        operation = f"{event} {Path(text).name.partition('-partial-')[0]}"
        self._write({"file": operation, "number": self._files})
        if self._files == self._file_at:
            self._strike(operation, text)

    def _write(self, row: dict[str, Any]) -> None:
        line = json.dumps({"rank": self._rank, "at": time.monotonic(), **row}) + "\n"
        with suppress(OSError), open(self._record, "a", encoding="utf-8") as file:  # the disk may be full on purpose
            file.write(line)

    def _lift(self) -> None:
        """The disk is no longer full."""
        if self._limited:
            self._limited = False
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def _lift_when_full(self, path: str, size: int) -> None:
        """Lift the limit soon after a file has met it: it holds for all files, also those that are in memory."""
        deadline = time.monotonic() + _LONGEST_FULL_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError):
                if os.stat(path).st_size >= size:
                    deadline = min(deadline, time.monotonic() + _FULL_SECONDS)
            time.sleep(0.001)
        self._lift()

    def _strike(self, where: str, path: str = "") -> None:
        fault = self._fault
        try:
            self._record.with_name(f"{self._record.name}.struck").touch(exist_ok=False)
        except FileExistsError:  # this rank was started again
            return
        assert fault is not None
        self._write({"struck": where, "phase": self._box.phase})
        match fault.kind:
            case "kill" | "recover-kill" | "elastic-kill" | "flip":
                os.kill(os.getpid(), signal.SIGKILL)
            case "recover-all-kill":
                for process in {*children(os.getppid())} - {os.getpid(), int(os.environ.get(FORKED_BY, "0"))}:
                    os.kill(process, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            case "save-kill":
                self._kill_after(fault.delay_seconds)
            case "launcher-kill":
                os.kill(os.getppid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "loop":
                _loop()
            case "lock":
                ctypes.PyDLL(None).sleep(_FOREVER_SECONDS)  # PyDLL: the call keeps the interpreter lock
            case "slow":
                assert self._forwards is not None
                self._forwards.times = fault.times
            case "preempt":
                os.kill(os.getppid() if fault.parent else os.getpid(), fault.signal)
            case "full-disk":
                self._limited = True
                threading.Thread(target=self._lift_when_full, args=(path, fault.limit_bytes), daemon=True).start()
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (fault.limit_bytes, hard))
            case "late-flip":
                own = f"-{self._rank + 1:05d}-of-"
                flip_bit(self._loading, fault.position, own)

    def _kill_after(self, seconds: float) -> None:
        if not seconds:
            os.kill(os.getpid(), signal.SIGKILL)
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


def _loop() -> NoReturn:
    while True:
        time.sleep(0.05)


class Forwards:
    """The calls of modules that no other module calls, in seconds of processor time: other load slows all alike.

    Attributes:
        times: how many times as long each takes from now on.
    """

    def __init__(self) -> None:
        from torch.nn.modules.module import (  # here: this module is not for torch alone
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        self.times, self._seconds = 1.0, 0.0
        self._began: list[float] = []  # of the calls that run
        register_module_forward_pre_hook(lambda *_: self._began.append(time.thread_time()))
        register_module_forward_hook(self._ends, always_call=True)

    def seconds(self) -> float:
        """Those of all calls since it was asked last."""
        found, self._seconds = self._seconds, 0.0
        return found

    def _ends(self, *_: Any) -> None:
        start = self._began.pop()
        if not self._began:
            end = start + self.times * (time.thread_time() - start)
            while self.times > 1 and time.thread_time() < end:
                pass
            self._seconds += time.thread_time() - start
