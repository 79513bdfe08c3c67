# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The layer SparseAttnIndexer: steps of serving against the formulas over unpaged keys and against the operations called
by hand; which rows and columns of the buffer it touches; candidate blocks; a step that is refused has written nothing."""

import re
from typing import NamedTuple

import numpy as np
import pytest
import topkey
from data import keys, power_of_two
from formulas import keys as key_formulas
from formulas import quantize, selection
from formulas.numbers import BF16, canonical
from formulas.rows import slot_of
from formulas.score import s_ref
from hypothesis import given
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
D, HEADS, PAGE, TOPK, COLUMNS = 32, 3, 4, 6, 9
I32 = np.int32


class Step(NamedTuple):
    """One step: its rows, and what the layer is given for them."""

    rows: list  # (request, visible keys), of padding (-1, 0)
    hidden: np.ndarray
    q: object
    k: np.ndarray
    w: np.ndarray
    metadata: topkey.StepMetadata


class Serving:
    """Requests of a paged cache that grow from step to step, and their keys unpaged."""

    def __init__(self, rng, fp4=False, requests=4, pages=40, buffer_rows=32):
        self.rng, self.fp4, self.format = rng, fp4, "mxfp4" if fp4 else "fp8"
        width = sum(key_formulas.row_bytes(self.format, D))
        # Pages with other bytes between them; what a page holds before it is written matters to no one.
        stride = (PAGE * width + 3) // 4 * 4 + 8
        pool = rng.integers(0, 256, (pages, stride)).astype(np.uint8)
        self.pages = pool[:, : PAGE * width].reshape(pages, PAGE, width)
        self.table = rng.permutation(pages)[: requests * 9].reshape(requests, 9).astype(I32)
        self.keys = [np.zeros((0, D), np.float32) for _ in range(requests)]
        self.buffer = np.full((buffer_rows, COLUMNS), 77, I32)

    def layer(self, **options):
        given = {"use_fp4_cache": self.fp4} | options
        return topkey.SparseAttnIndexer(self.pages, D, "ue8m0", TOPK, D, 36, 1000, self.buffer, **given)

    def step(self, new, padding=0, by_indptr=False):
        """new[b] further tokens of each request, each with a row of its own."""
        rng, rows, slots, k = self.rng, [], [], []
        for b, count in enumerate(new):
            # Whole numbers up to 4 exist in both formats, whatever their scale.
            more = rng.integers(-4, 5, (count, D)).astype(np.float32)
            self.keys[b] = np.concatenate([self.keys[b], more])
            k.append(more)
            for p in range(len(self.keys[b]) - count, len(self.keys[b])):
                rows.append((b, p + 1))
                slots.append(slot_of(p, self.table[b], PAGE))
        rows += [(-1, 0)] * padding
        slots += [-1] * padding
        k = np.concatenate([*k, rng.normal(size=(padding, D))]).astype(BF16)
        count = len(rows)
        codes, scales = keys(rng, self.format, count * HEADS, D, True)
        q = codes.reshape(count, HEADS, codes.shape[-1])
        q = (q, scales.reshape(count, HEADS, scales.shape[-1])) if self.fp4 else q
        who = {"request": np.array([b for b, _ in rows], I32)}
        if by_indptr:
            who = {"q_indptr": np.cumsum([0, *new]).astype(I32)}
        metadata = topkey.StepMetadata(
            np.array(slots, np.int64), self.table, np.array([end for _, end in rows], I32), 36,
            sum(n for n in new if n == 1), **who,
        )  # fmt: skip
        return Step(rows, np.zeros((count, 5)), q, k, power_of_two(rng, (count, HEADS)), metadata)

    def scores(self, step, r):
        """S_ref of one row against every key of its request."""
        x = self.keys[step.rows[r][0]]
        stored = quantize.mxfp4(x) if self.fp4 else quantize.fp8(x, "v32_key")
        k, outer = key_formulas.decode(self.format, *stored)
        codes, scales = (step.q[0][r], step.q[1][r]) if self.fp4 else (step.q[r], None)
        q, _ = key_formulas.decode(self.format, codes, np.ones(HEADS, np.float32) if scales is None else scales)
        return canonical(s_ref(q[None], k, step.w[r : r + 1].astype(np.float64), outer))[0]

    def answer(self, step, r, admitted=None):
        b, end = step.rows[r]
        if b < 0:
            return [-1] * TOPK
        scores, window = self.scores(step, r), (0, end)
        live = selection.live_positions(window, admitted)
        return selection.row_of(selection.select(lambda p: scores[p], live, TOPK, window), TOPK)

    def check(self, step):
        rows = len(step.rows)
        for r in range(rows):
            assert self.buffer[r].tolist() == self.answer(step, r) + [-1] * (COLUMNS - TOPK), r
        assert (self.buffer[rows:] == 77).all()


def forward(layer, step, on, **options):
    given = {"metadata": step.metadata, "k": step.k, "exec": on} | options
    return layer.forward(step.hidden, step.q, given.pop("k"), step.w, **given)


@pytest.mark.parametrize("fp4", [False, True])
@given(seed=seeds, by_indptr=st.booleans(), padding=st.integers(0, 3))
def test_steps_of_serving(backend, fp4, seed, by_indptr, padding):
    """Prefill; then decode rows, further chunks, requests without a row, rows of padding."""
    s, on = Serving(np.random.default_rng(seed), fp4), topkey.Exec(backend=backend)
    layer = s.layer()
    for new in ([9, 0, 5, 0], [1, 7, 1, 0], [1, 1, 0, 12]):
        s.buffer[:] = 77
        step = s.step(new, padding, by_indptr)
        assert forward(layer, step, on) is s.buffer
        s.check(step)


@pytest.mark.parametrize("scale_fmt", ["ue8m0", None])
def test_the_operations_by_hand(on, scale_fmt):
    rng = np.random.default_rng(7)
    s = Serving(rng)
    step = s.step([5, 9, 3, 1])
    step = step._replace(k=rng.normal(size=step.k.shape).astype(BF16), w=rng.normal(size=step.w.shape).astype(BF16))
    pages = s.pages.base.copy()[:, : PAGE * (D + 4)]
    cache = topkey.KeyCache(pages, PAGE, D)
    m = step.metadata
    topkey.store_k(step.k, m.slot_mapping, cache, scale="f32" if scale_fmt is None else scale_fmt, exec=on)
    want = topkey.paged_mqa_topk(
        step.q, cache, step.w, TOPK, block_table=m.block_table, end=m.end, request=m.request, max_len=m.max_len, exec=on
    )
    layer = topkey.SparseAttnIndexer(s.pages, D, scale_fmt, TOPK, D, 36, 1000, s.buffer)
    forward(layer, step, on)
    assert s.buffer[:18, :TOPK].tolist() == want.indices.tolist()
    assert s.pages.tobytes() == pages.reshape(s.pages.shape).tobytes()


@pytest.mark.parametrize(
    "form", ["[P, bytes]", "4-D", "int8", "fp8", "KeyCache", "bound later", "interleaved KeyCache"]
)
def test_forms_of_a_cache(on, form):
    s = Serving(np.random.default_rng(3))
    flat = np.zeros((len(s.pages), PAGE * (D + 4)), np.uint8)
    holder = type("Cache", (), {"kv_cache": np.zeros(0, np.uint8)})()
    layout = "interleaved" if form.startswith("interleaved") else "planar"
    given = {
        "[P, bytes]": flat, "4-D": flat.reshape(-1, PAGE, 1, D + 4), "int8": flat.view(np.int8),
        "fp8": flat.view("float8_e4m3fn"), "bound later": holder,
    }.get(form, topkey.KeyCache(flat, PAGE, D, "fp8", layout))  # fmt: skip
    layer = topkey.SparseAttnIndexer(given, D, "ue8m0", TOPK, D, 36, 1000, s.buffer)
    holder.kv_cache = flat
    step = s.step([9, 0, 3, 1])
    layer(step.hidden, step.q, step.k, step.w, metadata=step.metadata, exec=on)
    s.check(step)


def test_keys_of_another_format(on):
    """A KeyCache says the format: bf16 keys, plain queries."""
    rng = np.random.default_rng(4)
    s = Serving(rng)
    step = s.step([8, 3, 0, 1])
    step = step._replace(q=rng.integers(-4, 5, step.q.shape).astype(np.float32))
    cache = topkey.KeyCache(np.zeros((len(s.pages), PAGE * D * 2), np.uint8), PAGE, D, "bf16")
    layer = topkey.SparseAttnIndexer(cache, D, None, TOPK, D, 36, 1000, s.buffer)
    forward(layer, step, on)
    for r, (b, end) in enumerate(step.rows):
        k = s.keys[b].astype(np.float64)
        scores = canonical(s_ref(step.q[r : r + 1].astype(np.float64), k, step.w[r : r + 1], np.ones(len(k))))[0]
        chosen = selection.select(lambda p, scores=scores: scores[p], range(end), TOPK, (0, end))
        assert s.buffer[r, :TOPK].tolist() == selection.row_of(chosen, TOPK)
    assert layer.workspace_bytes(32, 4, 36) >= 0


def test_what_is_left_alone(on):
    s = Serving(np.random.default_rng(5))
    layer = s.layer()
    step = s.step([7, 1, 0, 2], padding=2)
    pages = s.pages.copy()
    for options in ({"metadata": None}, {"skip_step": True}):
        assert forward(layer, step, on, **options) is s.buffer
        assert (s.buffer == 77).all() and s.pages.tobytes() == pages.tobytes()
    # Without k, or told so, the cache is another's to write; the rows are answered from what stands there.
    forward(layer, step, on)
    s.check(step)
    want, pages = s.buffer.copy(), s.pages.copy()
    for one, k in ((layer, None), (s.layer(skip_k_cache_insert=True), -step.k)):
        s.buffer[:] = 77
        forward(one, step, on, k=k)
        assert s.buffer.tolist() == want.tolist() and s.pages.tobytes() == pages.tobytes()
    # Cleared rows keep what stands beyond topk.
    s.buffer[:] = 77
    forward(layer, step, on, cleared=True)
    assert s.buffer[:, :TOPK].tolist() == want[:, :TOPK].tolist() and (s.buffer[:, TOPK:] == 77).all()


def test_more_rows_than_are_answered(on):
    """Rows of hidden_states without an `end` are cleared; keys beyond slot_mapping are not stored."""
    s = Serving(np.random.default_rng(6))
    step = s.step([6, 2, 0, 0])
    pages = s.pages.copy()
    longer = np.concatenate([step.k, step.k[:3] * 2])
    forward(s.layer(), step._replace(hidden=np.zeros((11, 5))), on, k=longer)
    for r in range(8):
        assert s.buffer[r, :TOPK].tolist() == s.answer(step, r)
    assert (s.buffer[8:11] == -1).all() and (s.buffer[11:] == 77).all()
    written = (s.pages != pages).any(axis=(1, 2)).nonzero()[0]
    assert set(written) <= {*s.table[0, :2].tolist(), int(s.table[1, 0])}


def test_a_step_of_no_rows(on):
    s = Serving(np.random.default_rng(8))
    step = s.step([0, 0, 0, 0])
    assert forward(s.layer(), step, on) is s.buffer and (s.buffer == 77).all()
    forward(s.layer(), step._replace(hidden=np.zeros((2, 5))), on)
    assert (s.buffer[:2] == -1).all() and (s.buffer[2:] == 77).all()


def test_speculative_rows(on):
    """next_n rows a request, lengths a request or a row; block tables a row."""
    s = Serving(np.random.default_rng(9))
    forward(s.layer(), s.step([9, 4, 6, 2]), on)
    step = s.step([2, 2, 2, 2])
    lengths = np.array([len(k) for k in s.keys], I32)
    uniform = step.metadata._replace(request=None, next_n=2)
    per_row = uniform._replace(block_table=np.repeat(s.table, 2, axis=0), table_per_row=True)
    for metadata in (uniform, uniform._replace(end=lengths), per_row, per_row._replace(end=lengths)):
        s.buffer[:] = 77
        forward(s.layer(), step._replace(metadata=metadata), on)
        s.check(step)


def test_candidate_blocks(on):
    """A source publishes what select_blocks finds; a consumer looks at nothing else."""
    s = Serving(np.random.default_rng(10))
    blocks = np.full((32, 3), 55, I32)
    options = {"candidate_blocks": blocks, "candidate_block_size": 2}
    step = s.step([11, 5, 0, 13], padding=1)
    forward(s.layer(**options, candidate_write=True), step, on)
    s.check(step)
    rows = len(step.rows)
    for r, (b, end) in enumerate(step.rows):
        scores = s.scores(step, r) if b >= 0 else []
        want = selection.best_blocks(lambda p, scores=scores: scores[p], range(end), (0, end), 2, 3)
        assert blocks[r].tolist() == want
    assert (blocks[rows:] == 55).all()
    kept = blocks.copy()
    s.buffer[:] = 77
    forward(s.layer(**options), step, on, k=None)
    for r in range(rows):
        assert s.buffer[r, :TOPK].tolist() == s.answer(step, r, selection.in_blocks(kept[r], 2, 0))
    assert blocks.tolist() == kept.tolist()


def test_candidates_of_a_source_of_another_ratio(on):
    """Blocks of 3 keys of 4 tokens each are blocks of 6 keys of 2 tokens."""
    s = Serving(np.random.default_rng(16))
    step = s.step([11, 5, 0, 14])
    blocks = np.full((32, 2), -1, I32)
    blocks[: len(step.rows), 0] = 1
    options = {"candidate_blocks": blocks, "candidate_block_size": 3, "candidate_ratio": 4, "compress_ratio": 2}
    forward(s.layer(**options), step, on)
    for r in range(len(step.rows)):
        assert s.buffer[r, :TOPK].tolist() == s.answer(step, r, selection.in_blocks([1], 6, 0)), r


def test_workspace(on):
    s = Serving(np.random.default_rng(11))
    step = s.step([9, 5, 1, 3])
    layer = s.layer(candidate_blocks=np.zeros((32, 3), I32), candidate_block_size=2, candidate_write=True)
    size = layer.workspace_bytes(32, 4, 36, 1)
    assert 0 <= size <= layer.workspace_bytes(64, 8, 10**6, 4) <= (64 << 20) + 255
    for heads in (1, 64, 128):
        call = {"q": np.zeros((32, heads, D), np.uint8), "weights": np.zeros((32, heads), np.float32), "topk": TOPK}
        call |= {
            "cache": topkey.KeyCache(s.pages, PAGE, D),
            "block_table": s.table,
            "end": np.zeros(32, I32),
            "max_len": 36,
        }
        call |= {"request": np.zeros(32, I32), "block_size": 2, "num_blocks": 3, "out": ("indices", "blocks")}
        needed = topkey.workspace_bytes("paged_mqa_topk", **call, exec=on)
        assert size >= (needed + 255 if needed else 0)
    memory = np.full(size + 3, 0xA5, np.uint8)
    forward(layer, step, on, workspace=memory[3:])
    s.check(step)
    assert layer.workspace_bytes(0, 0, 0, 0) >= 0
    with pytest.raises(ValueError, match="SparseAttnIndexer: max_len must be at least 0, got -1"):
        layer.workspace_bytes(1, 1, -1)
    with pytest.raises(ValueError, match=re.escape("SparseAttnIndexer: max_rows must be a whole number from 0 on, got 1.5")):
        layer.workspace_bytes(1.5, 1, 1)


def test_a_strict_step_raises_before_it_writes(on):
    s = Serving(np.random.default_rng(12))
    step = s.step([9, 5, 1, 3])
    blocks = np.full((32, 3), 55, I32)
    layer, pages = s.layer(candidate_blocks=blocks, candidate_block_size=2, candidate_write=True), s.pages.copy()
    wild = s.table.copy()
    wild[1, 0] = 10**6
    for change in ({"block_table": wild}, {"slot_mapping": step.metadata.slot_mapping + 10**6}):
        with pytest.raises(ValueError):
            forward(layer, step._replace(metadata=step.metadata._replace(**change)), on._replace(strict=True))
        assert (s.buffer == 77).all() and (blocks == 55).all() and s.pages.tobytes() == pages.tobytes()
    stats = {strict: np.zeros(8, np.uint64) for strict in (True, False)}
    for strict in (True, False):
        forward(layer, step, on._replace(strict=strict, stats=stats[strict]))
        s.check(step)
    assert stats[True].tolist() == stats[False].tolist() and stats[True].any()


# ---- errors ----
WRONG_LAYERS = [
    ({"quant_block_size": 64}, "SparseAttnIndexer: quant_block_size must be head_dim 32, got 64"),
    ({"scale_fmt": "e8m0"}, "SparseAttnIndexer: scale_fmt must be 'ue8m0' or None, got 'e8m0'"),
    ({"topk_tokens": 0}, "SparseAttnIndexer: topk_tokens must be at least 1, got 0"),
    ({"topk_tokens": 10}, "topk_indices_buffer must be i32 [rows, >=10] of numpy or torch, got i32 [8, 9]"),
    ({"topk_indices_buffer": np.zeros((8, 9))}, "topk_indices_buffer must be i32 [rows, >=6] of numpy or torch, got"),
    ({"topk_indices_buffer": None}, "topk_indices_buffer must be i32 [rows, >=6] of numpy or torch, got NoneType"),
    ({"topk_tokens": "x"}, "SparseAttnIndexer: topk_tokens must be a whole number from 1 on, got 'x'"),
    ({"topk_tokens": 1.5}, "SparseAttnIndexer: topk_tokens must be a whole number from 1 on, got 1.5"),
    ({"compress_ratio": None}, "SparseAttnIndexer: compress_ratio must be a whole number from 1 on, got None"),
    ({"candidate_ratio": -1}, "SparseAttnIndexer: candidate_ratio must be at least 0, got -1"),
    (
        {"candidate_blocks": np.zeros((8, 2), I32), "candidate_block_size": 3, "compress_ratio": 4, "candidate_ratio": 2},
        "SparseAttnIndexer: candidate_ratio must be such that a source's block is a whole number of key rows of 4 tokens, "
        "got 2 with blocks of 3",
    ),
    ({"compress_ratio": 0}, "SparseAttnIndexer: compress_ratio must be at least 1, got 0"),
    ({"candidate_write": True}, "SparseAttnIndexer: candidate_blocks must be given with candidate_write, got None"),
    ({"candidate_blocks": np.zeros((8, 2), I32)}, "candidate_block_size must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), WRONG_LAYERS)
def test_layers_that_cannot_be(change, sentence):
    given = {
        "k_cache": None, "quant_block_size": D, "scale_fmt": "ue8m0", "topk_tokens": TOPK, "head_dim": D,
        "max_model_len": 36, "max_total_seq_len": 36, "topk_indices_buffer": np.zeros((8, 9), I32),
    }  # fmt: skip
    assert topkey.SparseAttnIndexer(**given).topk_tokens == TOPK
    with pytest.raises(ValueError, match=re.escape(sentence)):
        topkey.SparseAttnIndexer(**(given | change))


def changed(**change):
    return lambda step: {"metadata": step.metadata._replace(**change)}


WRONG_STEPS = [
    (ValueError, lambda s: {"q": s.q[:3]}, "paged_mqa_topk: q.values must be"),
    (ValueError, lambda s: {"q": (s.q, s.q)}, "q_quant must be one array without use_fp4_cache, got tuple"),
    (ValueError, lambda s: {"q": None}, "q_quant must be one array without use_fp4_cache, got NoneType"),
    (ValueError, lambda s: {"w": s.w[:, :2]}, "paged_mqa_topk: q.weights must be"),
    (ValueError, lambda s: {"k": s.k[:4]}, "store_k: k must be"),
    (ValueError, lambda s: {"k": s.k[:, :16]}, "store_k: k must be"),
    (ValueError, lambda s: {"hidden": s.hidden[:5]}, "metadata.end must be of at most 5 rows of hidden_states, got 12"),
    (ValueError, lambda s: {"hidden": np.zeros((40, 1))}, "must have the 40 rows of hidden_states, got 32"),
    (ValueError, lambda s: {"metadata": {"end": 1}}, "metadata must be a topkey.StepMetadata or None, got dict"),
    (ValueError, changed(max_len="x"), "metadata.max_len must be a whole number from 0 on, got 'x'"),
    (ValueError, changed(num_decode_rows=None), "metadata.num_decode_rows must be a whole number from 0 on, got None"),
    (ValueError, changed(next_n=1.5), "metadata.next_n must be a whole number from 0 on, got 1.5"),
    (ValueError, changed(end=None), "metadata.end must be int32 [rows], got None"),
    (ValueError, changed(end=np.ones(12)), "paged_mqa_topk: "),
    (ValueError, changed(block_table=np.zeros((4, 9))), "paged_mqa_topk: "),
    (ValueError, changed(request=np.zeros(4, I32)), "paged_mqa_topk: rows.request must be"),
    (ValueError, changed(q_indptr=np.zeros(5, I32)), "rows.q_indptr must be absent where rows.request is given"),
    (ValueError, changed(num_decode_rows=13), "metadata.num_decode_rows must be from 0 to 12, got 13"),
    (ValueError, changed(max_len=-1), "metadata.max_len must be at least 0, got -1"),
    (ValueError, changed(shard=topkey.Shard(0, 2)), "SparseAttnIndexer: group must be a communicator of the ranks, got None"),
    (ValueError, changed(shard=2), "SparseAttnIndexer: metadata.shard must be a Shard, got int"),
    (ValueError, changed(slot_mapping=[0, 1]), "store_k: slot_mapping must be an array, got list"),
    (ValueError, lambda s: {"w": [[1.0]]}, "paged_mqa_topk: weights must be an array, got list"),
    (ValueError, lambda s: {"cache": [[0] * 36]}, "k_cache must be [pages, page_size, 36]"),
    (ValueError, lambda s: {"cache": np.float32}, "k_cache must be [pages, page_size, 36]"),
    (ValueError, changed(row_shard_sizes=[6, 6]), "group must be a communicator of the ranks, got None"),
    (ValueError, lambda s: {"group": object()}, "group must be None without metadata.shard or metadata.row_shard_sizes"),
    (RuntimeError, lambda s: {"exec": topkey.Exec(backend="abacus")}, "this build has no such backend"),
    (ValueError, lambda s: {"workspace": np.zeros(64, np.int64)}, "exec.workspace must be uint8 [bytes], contiguous"),
    (ValueError, lambda s: {"cache": np.zeros((40, 4, 35), np.uint8)}, "k_cache must be [pages, page_size, 36]"),
    (ValueError, lambda s: {"cache": topkey.KeyCache(np.zeros((4, 200), np.uint8), 4, 64)}, "and of head_dim 32, got fp8 and 64"),
    (ValueError, lambda s: {"candidates": np.zeros((3, 2), I32)}, "paged_mqa_topk: admit.candidates must be"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "change", "sentence"), WRONG_STEPS)
def test_a_wrong_step_writes_nothing(on, error, change, sentence):
    s = Serving(np.random.default_rng(13))
    step = s.step([9, 1, 0, 2])
    change = change(step)
    layer, pages = s.layer(), s.pages.copy()
    layer.k_cache = change.pop("cache", layer.k_cache)
    layer.candidate_blocks, layer.candidate_block_size = change.pop("candidates", None), 2
    fields = {name: change.pop(name) for name in list(change) if name in Step._fields and name != "k"}
    with pytest.raises(error, match=re.escape(sentence)):
        forward(layer, step._replace(**fields), on, **change)
    assert (s.buffer == 77).all() and s.pages.tobytes() == pages.tobytes()


def test_fp4_wants_a_pair(on):
    s = Serving(np.random.default_rng(14), fp4=True)
    step = s.step([3, 1, 0, 2])
    for q, got in ((step.q[0], "ndarray"), ((step.q[0], None), "2 of them"), ((step.q[0],), "1 of them")):
        with pytest.raises(ValueError, match=re.escape(f"(values, scales) with use_fp4_cache, got {got}")):
            forward(s.layer(), step._replace(q=q), on)
    layer = s.layer()
    layer.k_cache = topkey.KeyCache(np.zeros((4, PAGE * 36), np.uint8), PAGE, D, "fp8")
    with pytest.raises(ValueError, match="k_cache must be of mxfp4 keys and of head_dim 32, got fp8 and 32"):
        forward(layer, step, on)
    assert (s.buffer == 77).all()


def test_too_small_a_workspace(backend):
    s = Serving(np.random.default_rng(15))
    step, layer, pages = s.step([9, 1, 0, 2]), s.layer(), s.pages.copy()
    needed = topkey.workspace_bytes("store_k", k=step.k, slot_mapping=step.metadata.slot_mapping,
                                    cache=topkey.KeyCache(s.pages, PAGE, D), exec=topkey.Exec(backend=backend))  # fmt: skip
    if backend == "ref":
        assert needed == 0  # it allocates by itself
        forward(layer, step, topkey.Exec(backend=backend), workspace=np.zeros(1, np.uint8))
        s.check(step)
        return
    with pytest.raises(ValueError, match=r"SparseAttnIndexer: workspace must be at least \d+ bytes from a multiple"):
        forward(layer, step, topkey.Exec(backend=backend), workspace=np.zeros(needed + 300, np.uint8))
    assert (s.buffer == 77).all() and s.pages.tobytes() == pages.tobytes()
