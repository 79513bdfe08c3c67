# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Rows of a step and slots of positions, counted out one by one."""

import numpy as np
import topkey
from formulas import rows as formulas
from formulas.rows import OneRank
from hypothesis import given
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
shards = st.integers(1, 4).flatmap(lambda w: st.builds(OneRank, st.integers(0, w - 1), st.just(w), st.integers(1, 3)))


@given(seed=seeds, shard=shards, ratio=st.integers(1, 4), page_size=st.integers(1, 5), spare=st.integers(-2, 4))
def test_expand_rows(backend, seed, shard, ratio, page_size, spare):
    rng = np.random.default_rng(seed)
    query_lens = rng.integers(0, 5, 4)
    seq_lens = (query_lens + rng.integers(-2, 20, 4)).clip(0).astype(np.int32)
    query_start = np.cumsum([0, *query_lens]).astype(np.int32)
    capacity = max(0, int(query_start[-1]) + spare)
    tables = rng.integers(-1, 50, (4, 9)).astype(np.int32)
    got = topkey.expand_rows(
        query_start, seq_lens, capacity=capacity, ratio=ratio, shard=topkey.Shard(*shard), block_table=tables,
        page_size=page_size, exec=topkey.Exec(backend=backend),
    )  # fmt: skip
    want = formulas.expand_rows(query_start, seq_lens, capacity, ratio, shard, tables, page_size)
    assert list(zip(*(array.tolist() for array in got), strict=True)) == want
    assert [a.dtype.name for a in got] == ["int32", "int32", "int64", "int64"]


@given(seed=seeds, shard=shards, page_size=st.integers(1, 5), compact=st.booleans())
def test_to_slots(backend, seed, shard, page_size, compact):
    rng = np.random.default_rng(seed)
    indices = rng.integers(-1, 40, (5, 7)).astype(np.int32)
    tables, requests = rng.integers(-1, 50, (3, 4)).astype(np.int32), rng.integers(-1, 4, 5).astype(np.int32)
    got = topkey.to_slots(
        indices, tables, page_size, row_request=requests, shard=topkey.Shard(*shard), compact=compact,
        exec=topkey.Exec(backend=backend),
    )  # fmt: skip
    slots, counts = formulas.to_slots(indices, requests, tables, page_size, shard, compact)
    assert got.slots.tolist() == slots and got.counts.tolist() == counts


def test_without_a_block_table_there_are_no_slots(on):
    got = topkey.expand_rows(np.array([0, 2], np.int32), np.array([5], np.int32), capacity=3, exec=on)
    assert got.slots is None and got.lens.tolist() == [4, 5, 0] and got.row_request.tolist() == [0, 0, -1]
