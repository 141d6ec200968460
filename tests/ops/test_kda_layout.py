"""How many segments a sequence gets, and how many groups of chunks a segment."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.ops.kda.layout import CACHE_PER_CORE, plan_groups, plan_segments


def ends(segments, chunks, passes, maps, cores):
    """When the last program ends if each core takes the next one as soon as it is free; maps before passes."""
    time = 0
    for programs in (maps, passes) if segments > 1 else (passes,):
        free = [time] * cores
        for _ in range(segments * programs):
            time = free[0] + -(-chunks // segments)
            heapq.heapreplace(free, time)
    return time


@pytest.mark.quick
@given(
    chunks=st.integers(1, 10**4),
    passes=st.integers(1, 40),
    more=st.integers(0, 40),
    cores=st.integers(1, 150),
)
def test_no_other_number_of_segments_ends_sooner(chunks, passes, more, cores):
    how = {"passes": passes, "maps": passes + more, "cores": cores}
    segments = plan_segments(chunks, **how)
    allowed = range(1, max(1, min(32, chunks // 128)) + 1)
    assert segments in allowed
    assert ends(segments, chunks, **how) == min(ends(x, chunks, **how) for x in allowed)


def test_long_sequences_of_few_heads_are_split_and_full_gpus_left_alone():
    # Heads of K = V = 128 on the 132 multiprocessors of a Hopper GPU: two programs a state, four a map.
    planned = lambda tokens, heads: plan_segments(tokens // 64, passes=2 * heads, maps=4 * heads, cores=132)
    assert planned(2**20, 1) == 32
    assert planned(2**16, 1) == 8, "segments stay long"
    assert planned(8192, 1) == 1
    assert planned(2**20, 96) == planned(2**20, 32) == 1
    assert 1 < planned(2**20, 8) < 32


@given(
    chunks=st.integers(1, 10**5),
    recurrences=st.integers(1, 4096),
    chunk_bytes=st.integers(1, 1 << 20),
    cores=st.integers(1, 1024),
)
def test_groups_hold_little_and_waste_less_than_a_group(chunks, recurrences, chunk_bytes, cores):
    groups = plan_groups(chunks, recurrences, chunk_bytes, cores)
    a_group = -(-chunks // groups)
    assert 1 <= groups <= chunks
    assert a_group == 1 or a_group * recurrences * chunk_bytes <= CACHE_PER_CORE * cores
    assert groups * a_group - chunks < groups
