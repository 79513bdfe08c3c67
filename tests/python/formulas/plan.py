# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Rules of a step's plan, request by request."""

from itertools import accumulate


def decode_requests(query_lens, prefilling, threshold, require_uniform, extends_prefill):
    """How many of the first requests decode."""
    if not query_lens or query_lens[0] > threshold:
        return 0
    alike = all(n in (query_lens[0], 0) for n in query_lens)
    for b, n in enumerate(query_lens):
        extends = extends_prefill and prefilling is not None and prefilling[b]
        odd = require_uniform and threshold > 1 and not alike and n != query_lens[0]
        if n > threshold or extends or odd:
            return b
    return len(query_lens)


def prefill_chunks(query_lens, key_lens, first, gather_rows, logits_bytes):
    """(first request, last, first row, last row, keys, skip_gather) of each chunk."""
    most_keys = gather_rows or float("inf")
    most_logits = logits_bytes // 4 if logits_bytes else float("inf")
    starts = [0, *accumulate(query_lens)]
    chunks, b = [], first
    while b < len(query_lens):
        end = b + 1
        while end < len(query_lens):
            rows, keys = sum(query_lens[b : end + 1]), sum(key_lens[b : end + 1])
            if keys > most_keys or rows * keys > most_logits:
                break
            end += 1
        rows, keys = sum(query_lens[b:end]), sum(key_lens[b:end])
        step = rows if rows * keys <= most_logits else max(1, most_logits // keys)
        if keys:
            for at in range(0, rows, max(step, 1)):
                last = min(at + step, rows)
                chunks.append((b, end, starts[b] + at, starts[b] + last, keys, at > 0))
        b = end
    return chunks


def decode_chunks(rows, width, budget):
    """Slices in units of 16 rows, as even as can be, the larger ones first."""
    if not rows or not budget or rows * width * 2 <= budget:
        return []
    most = budget // (2 * width) // 16
    units = -(-rows // 16)
    slices = -(-units // most)
    sizes = [units // slices + (s < units % slices) for s in range(slices)]
    ends = [min(rows, 16 * e) for e in accumulate(sizes)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def dearest_shard(query_lens, seq_lens, first, ratio, sizes):
    """The cost of the dearest shard: key rows seen by its rows."""
    costs = [
        max(0, seq - rows + 1 + j) // ratio
        for rows, seq in zip(query_lens[first:], seq_lens[first:], strict=True)
        for j in range(rows)
    ]
    ends = list(accumulate(sizes))
    return max(sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True))
