"""Each schedule against its staircase, and what no schedule can be. Closed forms are in test_closed_forms."""

from __future__ import annotations

import sys

import pytest

from pipeloom import schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir.text import format_orders, parse_action
from pipeloom.sim import Costs, simulate

# Rows are ranks, columns moments of equal length: the order of every rank and who waits for whom.
STAIRCASES = {
    "naive": """
        0F0 ... ... ... ... 0B0 0F1 ... ... ... ... 0B1
        ... 1F0 ... ... 1B0 ... ... 1F1 ... ... 1B1 ...
        ... ... 2F0 2B0 ... ... ... ... 2F1 2B1 ... ...
    """,
    "gpipe": """
        0F0 0F1 0F2 0F3 ... ... ... ... 0B0 0B1 0B2 0B3
        ... 1F0 1F1 1F2 1F3 ... ... 1B0 1B1 1B2 1B3 ...
        ... ... 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 ... ...
    """,
    "1f1b": """
        0F0 0F1 0F2 ... ... 0B0 0F3 0B1 0F4 0B2 ... 0B3 ... 0B4
        ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 1F4 1B3 ... 1B4 ...
        ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 ... ...
    """,
    "pipedream": """
        0F0 0F1 0F2 ... ... 0B0 0F3 0B1 0F4 0B2 0F5 0B3 ... 0B4 ... 0B5
        ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 ... 1B5 ...
        ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 ... ...
    """,
    "pipedream-2bw": """
        0F0 0F1 0F2 ... ... 0B0 0F3 0B1 0F4 0B2 0F5 0B3 ... 0B4 ... 0B5
        ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 ... 1B5 ...
        ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 ... ...
    """,
    "dapple-pb": """
        0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 ... 0B2 ... 0B3 ... 0B4 ... 0B5
        ... 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 ... 1B4 ... 1B5 ...
        ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 ... ...
    """,
    "interleaved": """
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
        ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ...
    """,
    "bfs": """
        0F0 0F1 0F2 2F0 2F1 2F2 ... ... 2B0 2B1 2B2 0B0 0B1 0B2
        ... 1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2 ...
    """,
    "zb-h1": """
        0F0 0F1 0F2 ... ... 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        ... 1F0 1F1 ... 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """,
    "zb-h2": """
        0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 ... ...
        ... 1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5 ...
        ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5
    """,
    "zb-v": """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 ...
        ... 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """,
    "v-half": """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 0F3 3W1 3F2 0I1 3I2 0W1 3W2 3F3 3I3 0I2 3W3 0I3 0W2 0W3 ...
        ... 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3
    """,
    "v-min": """
        0F0 0F1 0F2 ... ... 5F0 5I0 5W0 ... ... 5F1 0I0 5I1 0W0 5W1 5F2 5I2 0I1 5W2 0W1 ... 0I2 0W2
        ... 1F0 1F1 1F2 4F0 ... ... 4I0 4W0 4F1 1I0 1W0 ... 4I1 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2 ...
        ... ... 2F0 3F0 2F1 3F1 ... ... 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 ...
    """,
    "dualpipe": """
        0F0 1F1 0F2 1B1 --- 1F3 0B0 --- 1B3 --- 0I2 0W2
        0F1 1F0 0F3 1B0 --- 1F2 0B1 --- 1B2 --- 0I3 0W3
    """,
    "dualpipev": """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 --- ... 3F2 0B0 --- 3B2 --- ... 3F3 0B1 --- 3B3 --- 0I2 0W2 0I3 0W3
        ... 1F0 2F0 1F1 2F1 1F2 2B0 --- 2F2 1B0 --- 1F3 2B1 --- 2F3 1B1 --- 2B2 --- 1B2 --- ... 2I3 1I3 2W3 1W3
    """,
    "chimera": """
        0F0 0F2 ... 3F1 3B1 3F3 3B3 0B0 ... 0B2
        ... 1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2 ...
        ... 1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3 ...
        0F1 0F3 ... 3F0 3B0 3F2 3B2 0B1 ... 0B3
    """,
    "hanayo": """
        0F0 0F1 ... 3F0 3B0 3F1 3B1 0B0 ... 0B1
        ... 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 ...
    """,
    "zb-auto": """
        0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 ... ...
        ... 1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4 ...
        ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
    """,
    "terapipe": """
        0F0.0 0F0.1 0F0.2 ..... ..... ..... ..... 0B0.2 0B0.1 0B0.0
        ..... 1F0.0 1F0.1 1F0.2 ..... ..... 1B0.2 1B0.1 1B0.0 .....
        ..... ..... 2F0.0 2F0.1 2F0.2 2B0.2 2B0.1 2B0.0 ..... .....
    """,
    "seq1f1b": """
        0F0.0 0F0.1 0F1.0 ..... 0B0.1 0F1.1 0B0.0 ..... 0B1.1 0B1.0
        ..... 1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0 .....
    """,
    "seq1f1b-interleaved": """
        0F0.0 0F0.1 2F0.0 2F0.1 0F1.0 0F1.1 2B0.1 2F1.0 2B0.0 2F1.1 0B0.1 ..... 0B0.0 ..... 2B1.1 2B1.0 0B1.1 0B1.0
        ..... 1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 1F1.0 3B0.0 1F1.1 1B0.1 3F1.0 1B0.0 3F1.1 3B1.1 3B1.0 1B1.1 1B1.0 .....
    """,
    "search": """
        0F0 0F1 0F2 ... ... 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        ... 1F0 1F1 ... 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """,
}


def staircase(name: str, *, num_ranks: int, num_microbatches: int, num_slices: int = 1) -> str:
    """The simulated schedule drawn as above: F, I and W take one column; B one where no backward is split, else two."""
    schedule = schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=num_slices)
    half = [1.0 if schedule.split_backwards else 0.5] * schedule.num_stages
    forward, half = [1.0 * num_slices] * schedule.num_stages, [num_slices * seconds for seconds in half]
    costs = Costs.per_stage(forward=forward, backward_input=half, backward_weight=half)
    timeline = simulate(schedule, costs)
    idle = "..." if num_slices == 1 else "....."
    rows = []
    for row in timeline.spans:
        cells = [idle] * round(timeline.makespan)
        for action, start, end in row:
            first, last = round(start), round(end)
            cells[first:last] = [str(action)] + ["---"] * (last - first - 1)
        rows.append(" ".join(cells))
    return "\n".join(rows)


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_every_schedule_has_its_staircase(name):
    assert name in STAIRCASES, "add the staircase that staircase(...) draws to STAIRCASES"
    expected = [line.strip() for line in STAIRCASES[name].strip().splitlines()]
    actions = [parse_action(cell) for cell in expected[0].split() if cell.strip(".-")]
    num_microbatches = 1 + max(action.microbatch for action in actions)
    num_slices = 1 + max(action.slice or 0 for action in actions)
    drawn = staircase(name, num_ranks=len(expected), num_microbatches=num_microbatches, num_slices=num_slices)
    assert drawn.splitlines() == expected


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_every_schedule_has_the_name_of_its_row_and_a_public_function(name):
    family = schedules.FAMILIES[name]
    assert schedules.build(name, num_ranks=4, num_microbatches=8).name == name
    public = "search" if name == "search" else family.build.__name__
    assert public in schedules.__all__, "import the function in schedules/__init__.py and add it to __all__"


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_every_schedule_is_drawn_in_its_file(name):
    text = sys.modules[schedules.FAMILIES[name].build.__module__].__doc__
    drawn = {line.split(None, 2)[2] for line in text.splitlines() if line.strip().startswith("rank ")}
    assert drawn >= {line.strip() for line in STAIRCASES[name].strip().splitlines()}


def test_1f1b_with_fewer_micro_batches_than_ranks():
    assert staircase("1f1b", num_ranks=4, num_microbatches=2).splitlines() == [
        "0F0 0F1 ... ... ... ... ... 0B0 ... 0B1",
        "... 1F0 1F1 ... ... ... 1B0 ... 1B1 ...",
        "... ... 2F0 2F1 ... 2B0 ... 2B1 ... ...",
        "... ... ... 3F0 3B0 3F1 3B1 ... ... ...",
    ]


def test_the_order_of_1f1b_is_megatrons():
    assert format_orders(schedules.one_f_one_b(num_ranks=2, num_microbatches=3).orders) == (
        "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n"
    )


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("1f1", {}, "unknown.*Did you mean '1f1b'"),
        ("xyzzy", {}, "unknown.*See `pipeloom schedules`"),
        ("1f1b", {"num_ranks": 0}, "0 ranks.*at least 1"),
        ("1f1b", {"num_microbatches": -3}, "-3 micro-batches.*at least 1"),
        ("gpipe", {"num_chunks": 2}, "2 chunks: schedule 'gpipe' has 1 stage per rank. Use 1 chunk"),
        ("gpipe", {"num_chunks": 0}, "0 chunks.*at least 1"),
        ("zb-v", {"num_chunks": 3}, "3 chunks: schedule 'zb-v' has 2 stages per rank. Use 2 chunks"),
        ("interleaved", {"num_microbatches": 1}, "num_microbatches=1: .* needs a multiple of num_ranks=2. Use 2."),
        (
            "interleaved",
            {"num_microbatches": 3},
            "num_microbatches=3: schedule 'interleaved' needs a multiple of num_ranks=2. Use 2 or 4",
        ),
        ("dualpipe", {"num_ranks": 3, "num_microbatches": 8}, "even number of ranks. Use 2 or 4, or use dualpipev"),
        ("dualpipe", {"num_microbatches": 5}, "an even number of at least 4. Use 6"),
        ("dualpipe", {"num_microbatches": 2}, "an even number of at least 4. Use 4"),
        ("dualpipev", {"num_microbatches": 3}, "needs at least 4. Use 4"),
        ("chimera", {"num_ranks": 3}, "even number of ranks. Use 2 or 4"),
        ("hanayo", {"num_chunks": 3}, "even number of chunks, two per wave. Use 4"),
    ],
)
def test_impossible_schedules_are_refused_in_one_line(name, sizes, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        schedules.build(name, **{"num_ranks": 2, "num_microbatches": 4, **sizes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: schedules.build("interleaved", num_ranks=4, num_microbatches=8, virtual=2),
            r"virtual=2: schedule 'interleaved' has no argument `virtual`\. Use `num_chunks`\.",
        ),
        (
            lambda: schedules.interleaved(num_ranks=4, num_microbatches=8, pp=2),
            r"pp=2: interleaved\(.*\) has no argument `pp`\. Use `num_ranks`\.",
        ),
        (lambda: schedules.build("1f1b", num_ranks=4, num_microbatch=8), "Use `num_microbatches`"),
        (
            lambda: schedules.build("1f1b", num_ranks=4, num_microbatches=8, bogus=1),
            r"no argument `bogus`\. It takes num_ranks, num_microbatches, num_chunks, conditions, replicas\.",
        ),
        (
            lambda: schedules.one_f_one_b(4, 8),
            r"one_f_one_b\(4, 8\): all arguments are keyword arguments\. "
            r"Write one_f_one_b\(num_ranks=4, num_microbatches=8\)\.",
        ),
        (
            lambda: schedules.build("1f1b", 4, 8),
            r"only `name` is positional\. Write build\('1f1b', num_ranks=4, num_microbatches=8\)\.",
        ),
        (lambda: schedules.build("1f1b", num_ranks=4), "needs `num_microbatches`: it has no default"),
        (lambda: schedules.gpipe(num_ranks=2), r"gpipe\(num_ranks, num_microbatches\) needs `num_microbatches`"),
        (lambda: schedules.gpipe(num_ranks=None, num_microbatches=4), "None ranks: must be an int"),
        (lambda: schedules.build("1f1b", num_ranks=True, num_microbatches=8), "True ranks: must be an int"),
        (lambda: schedules.gpipe(num_ranks=2, num_microbatches=True), "True micro-batches: must be an int"),
    ],
)
def test_calls_with_other_keywords_are_told_the_right_ones(call, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_every_public_schedule_function_is_called_by_keyword():
    makers = {family.build for family in schedules.FAMILIES.values()}
    for maker in makers:
        with pytest.raises(ScheduleError, match=r"keyword arguments\. Write .*\(num_ranks=4, num_microbatches=8\)"):
            maker(4, 8)
