# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The package as a whole: what an import brings, that no operation or field is missing, questions about calls, Selection."""

import concurrent.futures
import inspect
import subprocess
import sys

import numpy as np
import pytest
import topkey
from data import problem
from topkey import _native, calls, operations


def test_an_import_brings_no_framework():
    code = "import sys, topkey; print([m for m in ('numpy', 'torch', 'ml_dtypes') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_operation_has_a_function():
    assert sorted(operations.OPERATIONS) == sorted(_native.operations())


# Fields that a keyword of another name, or an object, gives.
KEYWORDS = {
    "keys": "k", "key_scale": "k_scales", "q_scale": "q_scales", "starts": "start", "ends": "end", "lens": "length",
    "row_request": "request", "candidate_block": "candidate_block_size", "positions": "rope", "fill_value": "fill",
    "page_size": "cache", "head_dim": "cache", "layout": "cache", "slot_map.block_table": "slot_map",
}  # fmt: skip
# Fields that the library wants absent, or does not look at, in these operations.
NOT_ASKED = {
    "gather_k": {"table_per_row"}, "paged_mqa_topk": {"mask"},
    "expand_pools": {"starts", "max_len", "block_size", "order"},
    "merge_topk": {"max_len", "block_size"},
}  # fmt: skip


@pytest.mark.parametrize("op", _native.operations())
def test_every_field_is_a_keyword(op):
    keywords = inspect.signature(operations.OPERATIONS[op]).parameters
    assert all(p.kind is not p.VAR_KEYWORD for p in keywords.values())
    for field, written in _native.fields(op):
        if field in NOT_ASKED.get(op, ()):
            continue
        name = field.partition(".")[0]
        known = {field, name, KEYWORDS.get(field), "cache" if field == "format" else None, "out" if written else None}
        known |= {"blocks", "num_blocks"} & {name}
        assert known & set(keywords), f"{op}: no keyword for {field}"
    assert list(keywords)[-1] == "exec"


@pytest.mark.parametrize("op", _native.operations())
def test_docstrings_name_shapes_and_errors(op):
    text = operations.OPERATIONS[op].__doc__
    assert "[" in text and "ValueError" in text and "RuntimeError" in text


class Shape:
    """No memory at all."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype


def test_workspace_of_shapes_without_memory():
    shapes = {"q": Shape((8, 4, 64), "float32"), "weights": Shape((8, 4), "float32"), "topk": 16}
    sizes = [
        topkey.workspace_bytes("mqa_topk", **shapes, k=Shape((n, 64), "float32"), format="f32")
        for n in (100, 10_000, 2**30)
    ]
    assert sizes == sorted(sizes) and 0 < sizes[-1] <= 64 << 20
    real = {"q": np.zeros((8, 4, 64), np.float32), "weights": np.zeros((8, 4), np.float32), "topk": 16}
    assert topkey.workspace_bytes("mqa_topk", **real, k=np.zeros((100, 64), np.float32)) == sizes[0]
    logits = {"q": Shape((10**6, 4, 64), "float32"), "weights": Shape((10**6, 4), "float32")}
    assert topkey.workspace_bytes("mqa_logits", **logits, k=Shape((10**6, 64), "float32"), format="f32") >= 0
    with pytest.raises(ValueError, match="q.weights must be"):
        topkey.workspace_bytes(
            "mqa_topk", **(shapes | {"weights": Shape((8, 5), "float32")}), k=Shape((9, 64), "float32"), format="f32"
        )
    with pytest.raises(ValueError, match="mqa_topk: q must be an array, got Shape"):
        topkey.mqa_topk(**shapes, k=Shape((9, 64), "float32"), format="f32")


def test_a_given_workspace_serves(on):
    p = problem(np.random.default_rng(0), "fp8", 2, 2, 32, 50)
    call = dict(p.arguments) | p.dense | {"topk": 5}
    size = topkey.workspace_bytes("mqa_topk", **call, exec=on)
    want = topkey.mqa_topk(**call, exec=on).indices
    memory = np.full(size + 256, 0xA5, np.uint8)
    got = topkey.mqa_topk(**call, exec=on._replace(workspace=memory)).indices
    assert got.tolist() == want.tolist()
    if size:
        with pytest.raises(ValueError, match=f"mqa_topk: exec.workspace_bytes must be at least {size}"):
            topkey.mqa_topk(**call, exec=on._replace(workspace=memory[: size // 2]))


def test_threads_share_nothing():
    """The GIL is released; each thread has a workspace of its own."""
    problems = [problem(np.random.default_rng(seed), "fp8", 4, 2, 64, 700, exact=False) for seed in range(6)]

    def search(p):
        call = dict(p.arguments) | p.dense | {"topk": 64, "order": "score", "exec": topkey.Exec(threads=1)}
        return [topkey.mqa_topk(**call).indices.tobytes() for _ in range(8)]

    one_by_one = list(map(search, problems))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(search, problems)) == one_by_one
    assert len({answer for answers in one_by_one for answer in answers}) == len(problems)


def test_unsupported_says_why():
    scores = np.zeros((2, 4), np.float32)
    assert topkey.unsupported("topk", scores=scores, topk=2) is None
    reason = topkey.unsupported("topk", scores=scores, topk=2, exec=topkey.Exec(backend="abacus"))
    assert reason == "topk: backend 'abacus' was asked for, but this build has no such backend"
    assert "topk must be" in topkey.unsupported("topk", scores=scores, topk=-2)
    with pytest.raises(ValueError, match="there is no operation 'top_k'; there are expand_rows, "):
        topkey.unsupported("top_k", scores=scores)
    assert calls.DEFAULT_EXEC == topkey.Exec()


def test_the_library_speaks_for_itself():
    names = [b.name for b in topkey.backends()]
    assert "ref" in names and "cpu" in names
    assert topkey.numerics_version("ref", "fp8").startswith("fp8/ref/")
    with pytest.raises(
        ValueError, match="numerics_version: backend must be one of this build that has fp8 keys, got 'abacus'"
    ):
        topkey.numerics_version("abacus", "fp8")
    topkey.prepare("cpu")
    for device in ("cuda:1", 1):
        if not any(b.device == "cuda" for b in topkey.backends()):
            with pytest.raises(RuntimeError, match="prepare: device must be one with a usable backend, got cuda 1"):
                topkey.prepare(device)
    with pytest.raises(ValueError, match="prepare: device must be cpu, cuda or cuda:N, got 'tpu'"):
        topkey.prepare("tpu")


# ---- Selection ----
def selection(*rows):
    return topkey.Selection(indices=np.array(rows, np.int32))


def test_masks_and_overlap():
    a, b = selection([0, 2, -1], [1, 1, 5]), selection([2, 3, 0], [-1, -1, -1])
    assert a.to_mask(4).tolist() == [[True, False, True, False], [False, True, False, False]]
    assert a.overlap(b).tolist() == [np.float32(2 / 3), 1.0] and b.overlap(a).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="overlap: selections must have as many rows, got 2 and 1"):
        a.overlap(selection([1]))
    with pytest.raises(
        ValueError, match=r"to_mask: the selection must have indices, got Selection\(counts \[1\], unit='token'\)"
    ):
        topkey.Selection(counts=np.zeros(1, np.int32)).to_mask(3)


def test_key_rows_as_tokens():
    assert selection([0, 3, -1]).tokens(ratio=2).indices.tolist() == [[0, 1, 6, 7, -1, -1]]
    pools = selection([0, 2], [1, -1])
    got = pools.tokens(pool_size=4, end=np.array([14, 8], np.int32)).indices
    assert got.tolist() == [[0, 1, 2, 3, 8, 9, 10, 11, 12, 13, -1], [4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1]]
    assert got.dtype == np.int32
    assert selection([3, 1]).tokens().indices.tolist() == [[3, 1]]
    with pytest.raises(ValueError, match="tokens: ratio and pool_size must be at least 1, got 0 and 1"):
        pools.tokens(ratio=0)
