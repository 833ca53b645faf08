"""What a rank does to the agent of torchrun that has started it. No torch."""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_PROGRAMS = ("torchrun", "torch.distributed.run", "torch/distributed/run.py", "torch.distributed.launch")


def end_agent(environment: Mapping[str, str]) -> None:
    """End the agent of this process, which would start ranks again that refuse their input each time.

    The first rank of each agent does it, and only where a restart is left. A program that starts ranks with torch's
    functions, such as a notebook, is left alone.

    Args:
        environment: variables of this process.
    """
    count, most = (environment.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if environment.get("LOCAL_RANK") != "0" or not (count.isdecimal() and most.isdecimal() and int(count) < int(most)):
        return
    agent = os.getppid()
    with suppress(OSError):
        words = Path(f"/proc/{agent}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if any(word.endswith(_PROGRAMS) for word in words[:4]):
            sys.stderr.write("pipeloom: torchrun is ended: its restarts would meet the same error\n")
            sys.stderr.flush()
            os.kill(agent, signal.SIGTERM)
