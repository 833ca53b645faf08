"""Spare processes of the launcher take the ranks of processes that were killed."""

from __future__ import annotations

from pathlib import Path

from pipeloom.processes.launching.ranks import RankStarter, anonymous_file
from pipeloom.processes.recovery.recoveries import Tethers

# What a process of the run does: it notes its rank, and the rank and the generation of its lifeline.
BODY = """
import os
from pipeloom.processes.launching.ranks import LIFELINE, SPARE, rank_of_spare
place = rank_of_spare(int(os.environ[SPARE])) if SPARE in os.environ else os.environ
_, *lifeline, _ = place[LIFELINE].split(":")
with open(os.environ["NOTE"], "a") as file:
    file.write(f"{os.getpid()} {place['RANK']} {lifeline}\\n")
"""


def test_spares_take_ranks_in_their_order_and_ended_ones_are_passed_over(tmp_path: Path) -> None:
    note, tethers = tmp_path / "note", Tethers(2)
    with anonymous_file("meeting") as meeting:
        starter = RankStarter(
            ["rank 0", "rank 1"], ["-c", BODY], {"NOTE": str(note)}, meeting, tethers, None, num_spares=2
        )
        starter.prepare_spares()
        ended, waiting = (spare.process for spare in starter._spares)
        ended.kill()
        ended.wait()
        taken = starter.start(1, 3)
        assert taken.process is waiting
        assert taken.name == "rank 1"
        assert taken.process.wait(60) == 0
        new = starter.start(0, 4)  # no process waits
        assert new.process.wait(60) == 0
        starter.prepare_spares()
        left = [spare.process for spare in starter._spares]
        starter.end_spares()
        assert [process.returncode for process in left] == [-9, -9]
    tethers.close()
    assert note.read_text().splitlines() == [f"{waiting.pid} 1 ['1', '3']", f"{new.process.pid} 0 ['0', '4']"]
