"""Where the ranks of an elastic run begin: at the copies in memory of ranks of another layout."""

import json
import os
from collections.abc import Mapping
from typing import Any

from pipeloom.train.elastic.copies import as_checkpoint
from pipeloom.train.elastic.source import ENTRY
from pipeloom.train.recovery.run_recovery import Restart
from pipeloom.train.recovery.state_copies import StateCopies


def entry_of(environment: Mapping[str, str]) -> Restart | None:
    """Read what the launcher says in the environment; None: the configuration says where the run begins."""
    if ENTRY not in environment:
        return None
    told = json.loads(environment[ENTRY])
    step = told["step"]
    copies = [StateCopies(descriptors).read(step) for descriptors in told["copies"]]
    for descriptor in (each for descriptors in told["copies"] for each in descriptors):
        os.close(descriptor)  # the memory stays as long as something refers to it
    row: Mapping[str, Any] = next((copy.row for copy in copies if copy.row.get("step") == step), {})
    return Restart(
        as_checkpoint(copies), step, told["again"], unsaved=False, unevaluated=False, row=row, words=told["words"]
    )
