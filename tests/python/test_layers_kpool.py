# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The layer SparseAttnIndexerKpool: prefill in chunks, then decode, equals pooling the whole sequence at once and
selecting on its pools; what is optional; a step that is refused has written nothing."""

import re

import numpy as np
import pytest
import topkey
from formulas import selection
from formulas.numbers import BF16
from formulas.rows import slot_of
from hypothesis import given
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
D, HEADS, PAGE, TOPK = 32, 3, 4, 8
I32 = np.int32


class Sequence:
    """Requests with all their tokens, of which a step takes the next ones."""

    def __init__(self, rng, pool_size, tokens=(41, 23, 30)):
        self.rng, self.pool_size, self.tokens, self.done = rng, pool_size, tokens, [0] * len(tokens)
        self.k, self.gate = ([rng.normal(size=(n, D)).astype(BF16) for n in tokens] for _ in range(2))
        self.ape = rng.normal(size=(pool_size, D)).astype(np.float32)
        pages = len(tokens) * 11
        self.table = rng.permutation(pages).reshape(len(tokens), 11).astype(I32)
        self.pages = np.zeros((pages, PAGE, D + 4), np.uint8)
        self.ring = 2 * pool_size
        self.tail = np.zeros((len(tokens), 2, self.ring, D), BF16)
        self.buffer = np.full((40, TOPK + pool_size + 2), 77, I32)
        self.layer = topkey.SparseAttnIndexerKpool(
            self.pages, D, "ue8m0", TOPK, D, 44, 1000, self.buffer, tail_cache=self.tail
        )

    def slots(self, b, positions):
        """A slot where a token completes its pool."""
        p = self.pool_size
        return [slot_of(t // p, self.table[b], PAGE) if (t + 1) % p == 0 else -1 for t in positions]

    def step(self, new, padding=0, by_indptr=False):
        """new[b] further tokens of each request: rows (request, position), and what forward is given."""
        rng, p = self.rng, self.pool_size
        rows, slots, tails, k, gate = [], [], [], [], []
        for b, count in enumerate(new):
            part = range(self.done[b], min(self.done[b] + count, self.tokens[b]))
            self.done[b] = part.stop
            rows += [(b, t) for t in part]
            slots += self.slots(b, part)
            tails += [b * self.ring + t % self.ring for t in part]
            k.append(self.k[b][part.start : part.stop])
            gate.append(self.gate[b][part.start : part.stop])
        counts = [sum(one == b for one, _ in rows) for b in range(len(new))]
        rows, slots, tails = rows + [(-1, -1)] * padding, slots + [-1] * padding, tails + [-1] * padding
        for part in (k, gate):
            part.append(rng.normal(size=(padding, D)).astype(BF16))
        n = len(rows)
        raw = rng.normal(size=(n, HEADS, D)).astype(BF16)
        q, _, w = topkey.quantize_q(
            raw, rng.normal(size=(n, HEADS)).astype(np.float32), rule="kpool_query", hadamard=True
        )
        who = {"request": np.array([b for b, _ in rows], I32)}
        if by_indptr:
            who = {"q_indptr": np.cumsum([0, *counts]).astype(I32)}
        metadata = topkey.StepMetadata(
            np.array(slots, np.int64), self.table, np.array([(t + 1) // p for _, t in rows], I32), 44, 0, **who,
            tail_slots=np.array(tails, np.int64),
        )  # fmt: skip
        given = {
            "gate_score": np.concatenate(gate), "compress_ape": self.ape, "index_kpool": p,
            "positions": np.array([t for _, t in rows], np.int64), "metadata": metadata,
        }  # fmt: skip
        return rows, (np.zeros((n, 1)), q, np.concatenate(k), w), given

    def cache_of_the_whole(self, on):
        """Every pool of every request by one call."""
        pages = np.zeros_like(self.pages)
        for b, n in enumerate(self.tokens):
            topkey.pool_k(
                self.k[b], self.gate[b], self.ape, np.arange(n), np.array(self.slots(b, range(n)), np.int64),
                topkey.KeyCache(pages, PAGE, D), pool_size=self.pool_size, q_indptr=np.array([0, n], I32), exec=on,
            )  # fmt: skip
        return pages

    def answer(self, rows, q, w, cache, on, tail=True):
        """Pools by sorting scores of unpaged keys, tokens by counting, in plain Python."""
        p, answers = self.pool_size, []
        for r, (b, position) in enumerate(rows):
            n = self.tokens[b] // p if b >= 0 else 0
            scores = []
            if n > 0:
                k, scales = topkey.gather_k(cache, self.table[b : b + 1], np.array([0, n], I32), total=n, exec=on)
                scores = topkey.mqa_logits(q[r : r + 1], k, w[r : r + 1], k_scales=scales, exec=on)[0]
            window = (0, (position + 1) // p)
            best = selection.select(lambda g, scores=scores: scores[g], range(*window), TOPK // p, window)
            tokens = [g * p + i for g in selection.row_of(best, TOPK // p) for i in range(p) if g >= 0]
            tokens += [-1] * (TOPK - len(tokens))
            opened = list(range(window[1] * p, position + 1)) if tail else []
            answers.append(tokens + opened + [-1] * (self.buffer.shape[1] - TOPK - len(opened)))
        return answers


@pytest.mark.parametrize("pool_size", [1, 2, 4])
@given(seed=seeds, by_indptr=st.booleans(), padding=st.integers(0, 2))
def test_chunks_then_decode(backend, pool_size, seed, by_indptr, padding):
    rng, on = np.random.default_rng(seed), topkey.Exec(backend=backend)
    s = Sequence(rng, pool_size)
    cache = topkey.KeyCache(s.cache_of_the_whole(on), PAGE, D)
    steps = [rng.integers(0, 9, 3).tolist() for _ in range(4)] + [[1, 1, 1], [1, 0, 2], [30, 0, 1]]
    for new in steps:
        s.buffer[:] = 77
        rows, arrays, given = s.step(new, padding, by_indptr)
        assert s.layer.forward(*arrays, **given, exec=on) is s.buffer
        assert s.buffer[: len(rows)].tolist() == s.answer(rows, arrays[1], arrays[3], cache, on)
        assert (s.buffer[len(rows) :] == 77).all()
    for b, n in enumerate(s.done):
        for g in range(n // pool_size):
            page, row = divmod(slot_of(g, s.table[b], PAGE), PAGE)
            for part in (slice(row * D, (row + 1) * D), slice(PAGE * D + row * 4, PAGE * D + row * 4 + 4)):
                assert s.pages[page].ravel()[part].tolist() == cache.pages[page].ravel()[part].tolist()


@pytest.mark.parametrize("absent", ["gate_score", "compress_ape", "positions", "k", "skip_k_cache_insert"])
def test_what_is_absent(on, absent):
    """Keys are inserted only with all that pools need; without positions there are no columns of the open pool."""
    s = Sequence(np.random.default_rng(1), 4)
    rows, arrays, given = s.step([21, 10, 3])
    s.layer.forward(*arrays, **given, exec=on)
    cache = topkey.KeyCache(s.pages.copy(), PAGE, D)
    pages, tail = s.pages.copy(), s.tail.copy()
    s.buffer[:] = 77
    hidden, q, k, w = arrays
    if absent == "skip_k_cache_insert":
        s.layer.skip_k_cache_insert = True
    k = None if absent == "k" else -k
    given = given | ({absent: None} if absent in given else {})
    s.layer(hidden, q, k, w, **given, exec=on)
    assert s.pages.tobytes() == pages.tobytes() and s.tail.tobytes() == tail.tobytes()
    want = s.answer(rows, q, w, cache, on, tail=absent != "positions")
    assert s.buffer[: len(rows)].tolist() == want


def test_steps_that_touch_nothing(on):
    s = Sequence(np.random.default_rng(2), 4)
    _, arrays, given = s.step([9, 5, 0])
    for options in ({"metadata": None}, {"skip_step": True}):
        assert s.layer.forward(*arrays, **(given | options), exec=on) is s.buffer
        assert (s.buffer == 77).all() and not s.pages.any() and not s.tail.any()
    s.layer.forward(*arrays, **given, cleared=True, exec=on)
    assert (s.buffer[:14, TOPK + 3 :] == 77).all() and (s.buffer[:14, : TOPK + 3] != 77).all()


def test_whole_pools_need_no_tail(on):
    s = Sequence(np.random.default_rng(3), 4)
    s.layer.tail_cache = None  # the step's tail_slots are then another layer's
    rows, arrays, given = s.step([12, 8, 4])
    s.layer.forward(*arrays, **given, exec=on)
    cache = topkey.KeyCache(s.cache_of_the_whole(on), PAGE, D)
    assert s.buffer[: len(rows)].tolist() == s.answer(rows, arrays[1], arrays[3], cache, on)


def test_workspace_and_strict(on):
    s = Sequence(np.random.default_rng(4), 4)
    rows, arrays, given = s.step([12, 8, 5], padding=1)
    memory = np.full(s.layer.workspace_bytes(40, 3, 44, 1), 0xA5, np.uint8)
    strict = on._replace(strict=True)
    wild = s.table.copy()
    wild[0, 0] = -7
    for change in ({"block_table": wild}, {"slot_mapping": given["metadata"].slot_mapping + 10**6}):
        with pytest.raises(ValueError):
            s.layer.forward(*arrays, **(given | {"metadata": given["metadata"]._replace(**change)}), exec=strict)
        assert (s.buffer == 77).all() and not s.pages.any() and not s.tail.any()
    s.layer.forward(*arrays, **given, exec=strict, workspace=memory)
    cache = topkey.KeyCache(s.cache_of_the_whole(on), PAGE, D)
    assert s.buffer[: len(rows)].tolist() == s.answer(rows, arrays[1], arrays[3], cache, on)


def meta(**change):
    return lambda given: {"metadata": given["metadata"]._replace(**change)}


WRONG = [
    (ValueError, lambda g: {"index_kpool": 3}, "topk_tokens must be a multiple of index_kpool 3, got 8"),
    (ValueError, lambda g: {"index_kpool": 0}, "SparseAttnIndexerKpool: index_kpool must be at least 1, got 0"),
    (ValueError, lambda g: {"index_kpool": 2}, "pool_k: ape must be"),
    (ValueError, lambda g: {"index_kpool": 8, "compress_ape": np.zeros((8, D), np.float32)}, "expand_pools: out.indices"),
    (ValueError, lambda g: {"gate_score": g["gate_score"][:5]}, "pool_k: gate must be"),
    (ValueError, lambda g: {"positions": g["positions"][:5]}, "positions must be"),
    (ValueError, meta(tail_slots=None), "pool_k: tail_slots must be"),
    (ValueError, meta(end=np.zeros(14, np.float32)), "paged_mqa_topk: rows.end must be"),
    (ValueError, meta(block_table=np.zeros(3, I32)), "paged_mqa_topk: "),
    (ValueError, meta(shard=topkey.Shard(1, 2)), "SparseAttnIndexerKpool: group must be a communicator of the ranks"),
    (ValueError, lambda g: {"group": "tp"}, "SparseAttnIndexerKpool: group must be None without metadata.shard"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "change", "sentence"), WRONG)
def test_a_wrong_step_writes_nothing(on, error, change, sentence):
    s = Sequence(np.random.default_rng(5), 4)
    _, arrays, given = s.step([9, 5, 0])
    with pytest.raises(error, match=re.escape(sentence)):
        s.layer.forward(*arrays, **(given | change(given)), exec=on)
    assert (s.buffer == 77).all() and not s.pages.any() and not s.tail.any()


def test_a_wrong_layer():
    buffer = np.zeros((4, 8), I32)
    with pytest.raises(ValueError, match="SparseAttnIndexerKpool: quant_block_size must be head_dim 32, got 16"):
        topkey.SparseAttnIndexerKpool(None, 16, None, TOPK, D, 44, 44, buffer)
