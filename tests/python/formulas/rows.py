# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Rows of a step, shards, slots."""

from typing import NamedTuple


class OneRank(NamedTuple):
    rank: int = 0
    world_size: int = 1
    interleave: int = 1

    def owns(self, key_row):
        return key_row // self.interleave % self.world_size == self.rank

    def local(self, key_row):
        """Index among this rank's own key rows, counted out."""
        return sum(self.owns(g) for g in range(key_row))


def slot_of(position, table, page_size):
    """-1 where the table has no page for it."""
    page, row = divmod(position, page_size)
    if page >= len(table) or table[page] < 0:
        return -1
    return int(table[page]) * page_size + row


def expand_rows(query_start, seq_lens, capacity, ratio, shard, tables=None, page_size=0):
    """Rows as (row_request, lens, positions, slots), one tuple a row."""
    rows = []
    for r in range(capacity):
        request = next((b for b in range(len(seq_lens)) if query_start[b] <= r < query_start[b + 1]), None)
        if request is None:
            rows.append((-1, 0, -1, -1))
            continue
        rows_of_request = query_start[request + 1] - query_start[request]
        p = int(seq_lens[request] - rows_of_request + r - query_start[request])
        if p < 0:
            rows.append((request, 0, -1, -1))
            continue
        slot = -1
        if tables is not None and (p + 1) % ratio == 0 and shard.owns(p // ratio):
            slot = slot_of(shard.local(p // ratio), tables[request], page_size)
        rows.append((request, shard.local((p + 1) // ratio), p, slot))
    return rows


def to_slots(indices, requests, tables, page_size, shard, compact):
    """Rows of slots, and counts of the valid ones."""
    rows, counts = [], []
    for positions, request in zip(indices, requests, strict=True):
        slots = []
        for p in (int(p) for p in positions):
            mine = p >= 0 and shard.owns(p) and 0 <= request < len(tables)
            slots.append(slot_of(shard.local(p), tables[request], page_size) if mine else -1)
        valid = [s for s in slots if s >= 0]
        rows.append(valid + [-1] * (len(slots) - len(valid)) if compact else slots)
        counts.append(len(valid))
    return rows, counts
