"""What is exported for torch.distributed.pipelining, torch's own parser and lowering understand."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pipeloom import schedules
from pipeloom.ir.torch_csv import from_csv, to_csv
from pipeloom.passes import lower


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [("1f1b", 3, 5), ("interleaved", 2, 4), ("zb-h1", 3, 6), ("zb-v", 3, 6), ("v-half", 3, 6), ("dualpipev", 3, 8)],
)
def test_torch_reads_lowers_and_simulates_what_is_exported(name, ranks, microbatches):
    schedule = schedules.build(name, num_ranks=ranks, num_microbatches=microbatches)
    for pipeline in (schedule, lower(schedule)):
        rows = [line.split(",") for line in to_csv(pipeline).splitlines()]
        actions = {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
        assert [[str(action) for action in actions[rank]] for rank in actions] == rows
        units = [a for row in actions.values() for a in row if a.sub_actions is not None]
        assert len(units) == len(schedule.overlapped)
        assert {(str(f), str(b)) for f, b in (unit.sub_actions for unit in units)} == {
            (str(f), str(b)) for f, b in schedule.overlapped
        }
        assert from_csv(to_csv(pipeline), name=name) == schedule

    def rank_of(stage: int) -> int:
        return schedule.placement.replicas[stage][0]

    rows = [line.split(",") for line in to_csv(schedule).splitlines()]
    computing = {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    lowered = torch_schedules._add_send_recv(computing, rank_of, schedule.num_stages)
    assert sum(map(len, lowered.values())) == sum(len(order) for order in lower(schedule).orders) - len(
        schedule.overlapped
    )
