# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Plans against their rules, request by request."""

import pytest
import topkey
from formulas import plan as formulas
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def steps(draw):
    requests = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.booleans()), max_size=8))
    query_lens = [rows for rows, _, _ in requests]
    seq_lens = [rows + past for rows, past, _ in requests]
    return query_lens, seq_lens, draw(st.sampled_from([None, [p for _, _, p in requests]]))


@given(
    step=steps(), threshold=st.integers(1, 4), uniform=st.booleans(), extends=st.booleans(), ratio=st.integers(1, 4),
    gather_rows=st.sampled_from([0, 70, 100]), logits_bytes=st.sampled_from([0, 200, 900]), shards=st.integers(1, 4),
    least=st.integers(0, 3),
)  # fmt: skip
def test_plan_step(step, threshold, uniform, extends, ratio, gather_rows, logits_bytes, shards, least):
    query_lens, seq_lens, prefilling = step
    options = {
        "prefilling": prefilling, "decode_threshold": threshold, "require_uniform": uniform, "extends_prefill": extends,
        "ratio": ratio, "gather_rows": gather_rows, "logits_bytes": logits_bytes,
    }  # fmt: skip
    plan = topkey.plan_step(query_lens, seq_lens, row_shards=shards, min_shard_rows=least, **options)
    first = formulas.decode_requests(query_lens, prefilling, threshold, uniform, extends)
    keys = [n // ratio for n in seq_lens]
    decode = [n for n in query_lens[:first] if n]
    assert plan.num_decode_requests == first
    assert (plan.num_decode_rows, plan.num_prefill_rows) == (sum(query_lens[:first]), sum(query_lens[first:]))
    assert plan.max_next_n == max(decode, default=0) and plan.decode_uniform == (len(set(decode)) < 2)
    assert (plan.max_decode_len, plan.max_prefill_len) == (max(keys[:first], default=0), max(keys[first:], default=0))
    chunks = formulas.prefill_chunks(query_lens, keys, first, gather_rows, logits_bytes)
    assert [tuple(c) for c in plan.chunks] == chunks
    assert topkey.prefill_chunks(query_lens, seq_lens, **options) == plan.chunks

    sizes = plan.row_shard_sizes
    assert bool(sizes) == (shards > 1 and plan.num_prefill_rows >= shards * max(least, 1))
    ranks = [topkey.RowShard.of(plan, rank) for rank in range(len(sizes) or 1)]
    assert ranks[0].first_row == plan.num_decode_rows
    assert ranks[-1].last_row == plan.num_decode_rows + plan.num_prefill_rows
    if sizes:
        assert len(sizes) == shards and min(sizes) >= 1
        equal = [plan.num_prefill_rows // shards + (s < plan.num_prefill_rows % shards) for s in range(shards)]
        costs = [formulas.dearest_shard(query_lens, seq_lens, first, ratio, cut) for cut in (sizes, equal)]
        assert costs[0] <= costs[1]
    for chunk in plan.chunks:
        parts = [rank.narrow(chunk) for rank in ranks]
        assert sum(part.last - part.first for part in parts) == chunk.last_row - chunk.first_row


@given(rows=st.integers(0, 500), width=st.integers(1, 50), units=st.integers(1, 9), budget=st.booleans())
def test_decode_chunks(rows, width, units, budget):
    budget = 32 * width * units if budget else 0
    assert [tuple(r) for r in topkey.decode_chunks(rows, width, budget)] == formulas.decode_chunks(rows, width, budget)


def test_wrong_plans_raise_the_librarys_sentence():
    with pytest.raises(ValueError, match=r"plan_step: query_lens must be from 0 to 2147483647, got -1"):
        topkey.plan_step([-1], [3])
    with pytest.raises(
        ValueError, match=r"prefill_chunks: gather_rows must be enough for the longest request, 9, got 5"
    ):
        topkey.prefill_chunks([4], [9], gather_rows=5)
    with pytest.raises(ValueError, match=r"decode_chunks: budget must be enough for 16 bf16 rows"):
        topkey.decode_chunks(100, 10, 10)
    with pytest.raises(ValueError, match=r"seq_lens must be as long as query_lens, 2, got 1"):
        topkey.plan_step([1, 1], [3])
    with pytest.raises(ValueError, match=r"RowShard: rank must be one of the plan's, got 9"):
        topkey.RowShard.of(topkey.plan_step([8], [8], row_shards=2), 9)


def test_row_shards_end_where_rounds_do():
    plan = topkey.plan_step([8192], [65536], row_shards=2, rows_at_once=1056)
    assert plan.row_shard_sizes == [4224, 3968]
    by_cost = topkey.plan_step([8192], [65536], row_shards=2)
    assert by_cost.row_shard_sizes[0] > 4224 and by_cost._replace(row_shard_sizes=[]) == plan._replace(row_shard_sizes=[])
    with pytest.raises(ValueError, match="rows_at_once must be from 0 to 2147483647, got -1"):
        topkey.plan_step([8192], [65536], row_shards=2, rows_at_once=-1)
