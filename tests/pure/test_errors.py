"""Values of users in messages: on one line, and short."""

from __future__ import annotations

import json

import pytest

from pipeloom.errors import InputError, folded, one_line, shortened
from pipeloom.plan.cluster import parse_cluster
from pipeloom.plan.partition import parse_profile
from pipeloom.plan.slicing import parse_slice_costs
from pipeloom.sim import parse_costs


def test_what_is_long_lacks_its_middle():
    assert folded("a\nb") == r"'a\nb'"
    assert folded([1, {"a": None}]) == "[1, {'a': None}]"
    assert folded(list(range(10**6))) == "[0, 1, 2, 3, 4, 5, ...]"
    assert folded("a" * 50 + "b" * 50, 20) == "'aaaaaaa...bbbbbbbb'"
    assert folded(10**5000) == "a value of type int"
    assert len(folded("x" * 1000)) == 60
    assert shortened("so  long\n a text as this", 15) == "so lon...s this"
    assert shortened("short\n enough", 12) == "short enough"
    assert one_line(ValueError("two\n lines")) == "ValueError: two lines"


@pytest.mark.parametrize(
    "parse",
    [parse_profile, parse_slice_costs, parse_costs, parse_cluster],
    ids=lambda parse: parse.__name__,
)
@pytest.mark.parametrize("data", [{"k" * 10_000: 1}, [0] * 10_000, {"layers": [["x"] * 10_000]}])
def test_what_files_hold_is_refused_in_a_line_that_can_be_read(parse, data):
    with pytest.raises(InputError) as caught:
        parse(json.dumps(data))
    assert len(str(caught.value)) < 500
