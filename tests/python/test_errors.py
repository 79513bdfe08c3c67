# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A wrong argument raises ValueError with the library's sentence, and nothing is written."""

import re

import numpy as np
import pytest
import topkey
from data import paged, problem

I32 = np.int32


def mqa(**change):
    p = problem(np.random.default_rng(0), "fp8", 4, 2, 32, 12)
    out = {"indices": np.full((4, 3), 77, I32), "scores": np.full((4, 3), 77, np.float32)}
    return topkey.mqa_topk, dict(p.arguments) | p.dense | {"topk": 3, "out": out} | change, list(out.values())


def paged_mqa(**change):
    rng = np.random.default_rng(0)
    p = problem(rng, "bf16", 4, 2, 32, 12)
    cache, table = paged(rng, p, [12], 4)
    out = {"indices": np.full((4, 3), 77, I32)}
    call = {"q": p.arguments["q"], "cache": cache, "weights": p.arguments["weights"], "topk": 3, "block_table": table}
    call |= {"end": np.full(4, 12, I32), "request": np.zeros(4, I32), "out": out}
    return topkey.paged_mqa_topk, call | change, list(out.values())


def store(**change):
    pages = np.full((2, 4 * 36), 77, np.uint8)
    call = {"k": np.ones((3, 32), np.float32), "slot_mapping": np.arange(3), "cache": topkey.KeyCache(pages, 4, 32)}
    return topkey.store_k, call | change, [pages]


def select(**change):
    out = np.full((2, 3), 77, I32)
    return topkey.topk, {"scores": np.ones((2, 8), np.float32), "topk": 3, "out": {"indices": out}} | change, [out]


WRONG = [
    (mqa(weights=np.ones((4, 3), np.float32)), "mqa_topk: q.weights must be f32|bf16 [>=4, 2] with unit last stride, got f32 [4, 3]"),
    (mqa(weights=np.ones((4, 2), np.float16)), "mqa_topk: q.weights must be f32|bf16 [>=4, 2] with unit last stride, got f16 [4, 2]"),
    (mqa(q=np.ones((4, 2, 31), np.uint8)), "mqa_topk: q.values must be f8_e4m3fn|u8 [>=4, >=1, 32] with unit last stride, got u8 [4, 2, 31]"),
    (mqa(q=np.ones((4, 32), np.uint8)), "mqa_topk: q.values must be f8_e4m3fn|u8 [>=4, >=1, 32] with unit last stride, got u8 [4, 32]"),
    (mqa(k_scales=None), "mqa_topk: keys.scales must be"),
    (mqa(k=np.ones((12, 64), np.uint8)[:, ::2]), "got u8 [12, 32] with last stride 2"),
    (mqa(topk=0), "mqa_topk: topk must be"),
    (mqa(end=np.zeros(3, I32)), "mqa_topk: rows.end must be i32 [4], got i32 [3]"),
    (mqa(end=np.zeros(4, np.int64)), "mqa_topk: rows.end must be i32 [*], got i64 [4]"),
    (mqa(end=np.zeros(4, I32), length=np.zeros(4, I32)), "mqa_topk: rows.length must be absent where rows.end is given"),
    (mqa(end=np.zeros(4, I32), causal=True), "mqa_topk: causal must be False where start, end or length is given, got True"),
    (mqa(mask=np.ones((4, 11), bool)), "mqa_topk: admit.mask must be"),
    (mqa(candidates=np.zeros((4, 2), I32)), "mqa_topk: admit.candidate_block_size must be from 1"),
    (mqa(order="best"), "mqa_topk: order must be one of position, score, any, got 'best'"),
    (mqa(format="fp9"), "mqa_topk: format must be one of fp8, mxfp4, bf16, f16, f32, q8_0, fp8_fnuz, got 'fp9'"),
    (mqa(fill="zero"), "mqa_topk: fill must be one of minus_one, repeat, value, got 'zero'"),
    (mqa(topk=2**40), f"mqa_topk: topk must be a whole number of 32 bits, got {2**40}"),
    (mqa(out={"best": np.zeros((4, 3), I32)}), "mqa_topk: out must be of indices, slots, scores, counts, blocks, got 'best'"),
    (mqa(out={"indices": np.zeros((4, 2), I32)}), "mqa_topk: out.indices must be i32 [>=4, >=3] with unit last stride, got i32 [4, 2]"),
    (mqa(out={"counts": np.zeros(4, I32)}), "mqa_topk: out.indices must be given (or out.slots), got an absent tensor"),
    (mqa(out={"indices": np.broadcast_to(np.zeros(3, I32), (4, 3))}), "mqa_topk: out.indices must be an array that can be written"),
    (mqa(exec=topkey.Exec(workspace=np.zeros(8, np.float32))), "mqa_topk: exec.workspace must be uint8 [bytes], contiguous"),
    (mqa(exec=topkey.Exec(stats=np.zeros(7, np.uint64))), "mqa_topk: exec.stats must be uint64 [8], contiguous"),
    (mqa(exec=topkey.Exec(stats=np.zeros(8, np.int64))), "mqa_topk: exec.stats must be uint64 [8], contiguous"),
    (mqa(end=np.zeros(4, np.int64)[::-1]), "mqa_topk: end must be an array without negative strides"),
    (mqa(length=np.zeros(4, np.int64)[::-1]), "mqa_topk: length must be an array without negative strides"),
    (mqa(exec=topkey.Exec(threads=-1)), "mqa_topk: exec.threads must be"),
    (paged_mqa(end=None), "paged_mqa_topk: rows.end must be given (or rows.length) for paged keys, got an absent tensor"),
    (paged_mqa(end=np.zeros(2, I32)), "paged_mqa_topk: rows.end must be i32 [4], got i32 [2]"),
    (paged_mqa(block_table=np.zeros(3, I32)), "paged_mqa_topk: keys.block_table must be i32"),
    (paged_mqa(cache=topkey.KeyCache(np.zeros((3, 100), np.uint8), 4, 32, "bf16")), "paged_mqa_topk: cache.pages must be f8_e4m3fn|u8 [*, >=256]"),
    (paged_mqa(request=np.zeros(4, I32), q_indptr=np.zeros(2, I32)), "paged_mqa_topk: rows.q_indptr must be absent where rows.request is given"),
    (paged_mqa(shard=topkey.Shard(2, 2)), "paged_mqa_topk: shard.rank must be from 0 to 1, got 2"),
    (store(slot_mapping=np.zeros(3, np.float32)), "store_k: slot_mapping must be i32|i64 [*], got f32 [3]"),
    (store(k=np.zeros((3, 16), np.float32)), "store_k: k must be f32|f16|bf16 [>=3, 32] with unit last stride, got f32 [3, 16]"),
    (store(rule="v32_query"), "store_k: rule must be automatic or a rule of fp8 keys, got rule 2"),
    (store(rope=topkey.Rope(np.zeros(3, I32), np.zeros((4, 8), np.float32), 8, style="neox")), "store_k: rope.style must be half_split or interleaved, got 'neox'"),
    (store(rope=topkey.Rope(np.zeros(3, I32), np.zeros((4, 8), np.float32), 6)), "store_k: rope.cos_sin must be"),
    (store(norm=topkey.Norm("batch")), "store_k: norm.kind must be one of none, layer, rms, got 'batch'"),
    (select(scores=np.ones((2, 8), I32)), "topk: scores must be f32|f16|bf16 [>=2, *] with unit last stride, got i32 [2, 8]"),
    (select(count=3), "topk: scores must be f32|f16|bf16 [>=3, *] with unit last stride, got f32 [2, 8]"),
    (mqa(k=None, format=None), "mqa_topk: k must be given, got None"),
    (mqa(out=None), "mqa_topk: out must be of indices, slots, scores, counts, blocks, got None"),
    (mqa(topk=-1, out="indices"), "mqa_topk: topk must be from 1 to 2147483647, got -1"),
    (mqa(topk=2.5, out="indices"), "mqa_topk: topk must be a whole number of 32 bits, got 2.5"),
    (mqa(topk=2**62, out="indices"), "mqa_topk: topk must be a whole number of 32 bits, got 4611686018427387904"),
    (mqa(count=-1, out="indices"), "mqa_topk: rows.count must be from 0 to 2147483647, got -1"),
    (paged_mqa(cache=None), "paged_mqa_topk: cache must be a KeyCache, got NoneType"),
    (store(cache=np.zeros((3, 512), np.uint8)), "store_k: cache must be a KeyCache, got ndarray"),
    (store(norm="rms"), "store_k: norm must be a Norm, got str"),
    (store(rope=(1, 2)), "store_k: rope must be a Rope, got tuple"),
    (store(cache=3), "store_k: cache must be a KeyCache, got int"),
    (store(slot_mapping=[0, 1, 2]), "store_k: slot_mapping must be an array, got list"),
    (store(cache=topkey.KeyCache([[0] * 144], 4, 32)), "store_k: cache must be an array, got list"),
    (paged_mqa(shard=3), "paged_mqa_topk: shard must be a Shard, got int"),
    (paged_mqa(slot_map=3), "paged_mqa_topk: slot_map must be a SlotMap, got int"),
    (paged_mqa(block_table=[[0, 1, 2]]), "paged_mqa_topk: block_table must be an array, got list"),
    (mqa(out=3), "mqa_topk: out must be of indices, slots, scores, counts, blocks, got int"),
    (mqa(out=[[]]), "mqa_topk: out must be of indices, slots, scores, counts, blocks, got list"),
    (mqa(exec="cpu"), "mqa_topk: exec must be a topkey.Exec, got 'cpu'"),
    (mqa(exec=topkey.Exec(backend=3)), "mqa_topk: exec.backend must be a string or None, got 3"),
    (mqa(exec=topkey.Exec(backend="\ud800")), "mqa_topk: exec.backend must be a string or None, got "),
    (mqa(exec=topkey.Exec(threads="two")), "mqa_topk: exec.threads must be a whole number, got 'two'"),
    (select(count=-1), "topk: rows.count must be from 0 to 2147483647, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_wrong_arguments(case, sentence):
    operation, arguments, outputs = case
    before = [array.copy() for array in outputs]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        operation(**arguments)
    for array, was in zip(outputs, before, strict=True):
        assert array.tobytes() == was.tobytes()


@pytest.mark.parametrize("make", [mqa, paged_mqa, store, select])
def test_the_same_calls_unchanged_do_write(make):
    operation, arguments, outputs = make()
    before = [array.copy() for array in outputs]
    operation(**arguments)
    assert all((array != was).any() for array, was in zip(outputs, before, strict=True))


def test_backends_that_cannot_run_it():
    operation, arguments, _ = mqa(exec=topkey.Exec(backend="abacus"))
    with pytest.raises(
        RuntimeError, match="mqa_topk: backend 'abacus' was asked for, but this build has no such backend"
    ):
        operation(**arguments)
    operation, arguments, _ = mqa(exec=topkey.Exec(arithmetic="ref", backend="cpu"))
    with pytest.raises(RuntimeError, match="mqa_topk: backend 'cpu' was asked for, but its arithmetic is f32, not ref"):
        operation(**arguments)


def test_strict_raises_on_wild_values(on):
    operation, arguments, outputs = paged_mqa(exec=on._replace(strict=True))
    arguments["block_table"][0, 1] = 10**6
    with pytest.raises(ValueError, match="paged_mqa_topk"):
        operation(**arguments)
    assert (outputs[0] == 77).all()


def test_wrong_keywords_are_type_errors():
    operation, arguments, _ = mqa(k_scale=np.ones(12, np.float32))
    with pytest.raises(TypeError, match="k_scale"):
        operation(**arguments)


def test_arguments_of_another_kind_are_value_errors():
    pools, cells = np.zeros((2, 3), np.int32), np.full(2, 5, np.int32)
    with pytest.raises(ValueError, match="^expand_pools: "):
        topkey.expand_pools(pools, cells, None)
    with pytest.raises(ValueError, match="^expand_pools: "):
        topkey.expand_pools(pools, cells, "x")
    with pytest.raises(ValueError, match="^quantize_k: "):
        topkey.quantize_k(np.zeros((2, 32), np.float32), format=[])
