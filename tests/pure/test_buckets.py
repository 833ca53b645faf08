"""Which neighbours go together."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipeloom.ir import Granularity
from pipeloom.parallel.data.buckets import BucketRule, ParameterUse

MIB = 1 << 20


def of_layers(*layers: list[int]) -> list[ParameterUse]:
    return [ParameterUse("", size, (index,), (0,)) for index, sizes in enumerate(layers) for size in sizes]


def test_buckets_fill_from_the_last_and_the_rest_is_the_first():
    items = of_layers([4, 1], [4, 1], [4, 1], [2])
    assert BucketRule(5, whole_layers=False).cut(items) == [range(2), range(2, 4), range(4, 7)]
    assert BucketRule(6, whole_layers=False).cut(items) == [range(1), range(1, 4), range(4, 7)]
    assert BucketRule(3, whole_layers=False).cut(items) == [range(2), range(2, 4), range(4, 5), range(5, 7)]
    assert BucketRule(3, whole_layers=True).cut(items) == [range(2), range(2, 4), range(4, 7)]
    assert BucketRule(0, whole_layers=False).cut(items) == [range(i, i + 1) for i in range(7)]
    assert BucketRule(99, whole_layers=True).cut(items) == [range(7)]
    assert BucketRule(5, whole_layers=True).cut([]) == []


@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(0, 100),
    st.booleans(),
)
def test_few_buckets_none_larger_than_it_must_be(layers, least, whole):
    items = of_layers(*layers)
    found = BucketRule(least, whole).cut(items)
    assert [i for bucket in found for i in bucket] == list(range(len(items)))
    sizes = [sum(items[i].num_bytes for i in bucket) for bucket in found]
    assert all(size >= least for size in sizes[1:])
    largest = max(sum(sizes) if whole else max(sizes) for sizes in layers)
    assert all(size < least + largest or size == largest for size in sizes)
    if whole:
        assert all(items[a[-1]].layers < items[b[0]].layers for a, b in pairwise(found))


def test_what_is_gathered_again_and_again_stays_small():
    assert BucketRule.of(Granularity.STEP, 8 * MIB, whole_parameters=False) == BucketRule(8 * MIB, False)
    assert BucketRule.of(Granularity.CHUNK, 8 * MIB, whole_parameters=True) == BucketRule(8 * MIB, True)
    assert BucketRule.of(Granularity.MICROBATCH, 8 * MIB, whole_parameters=False) == BucketRule(2 * MIB, True)
    assert BucketRule.of(Granularity.MICROBATCH, 9, whole_parameters=False) == BucketRule(9, True)
