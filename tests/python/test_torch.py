# SPDX-License-Identifier: Apache-2.0 OR MIT
"""torch tensors: the answers of numpy arrays, as tensors; meta tensors, GPU tensors. Runs where torch is installed."""

import numpy as np
import pytest
import topkey
from data import SUPPORTED, paged, problem
from test_layers import D, TOPK, Serving
from test_layers_kpool import Sequence

pytestmark = pytest.mark.torch
OUT = ("indices", "scores", "counts")


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def to_torch(torch, x):
    """The same memory as a tensor; ml_dtypes by way of their bytes."""
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.kind in "fiub" and x.dtype.name not in ("bfloat16", "float8_e4m3fn"):
        return torch.from_numpy(x)
    bytes_of = np.ascontiguousarray(x).view(np.uint8 if x.itemsize == 1 else np.int16)
    return torch.from_numpy(bytes_of).view(getattr(torch, x.dtype.name))


def call_of(format):
    p = problem(np.random.default_rng(0), format, 4, 2, 32, 30)
    return dict(p.arguments) | p.dense | {"topk": 5, "out": OUT}


@pytest.mark.parametrize("format", SUPPORTED)
def test_tensors_give_the_answers_of_arrays(torch, on, format):
    call = call_of(format)
    want = topkey.mqa_topk(**call, causal=True, exec=on)
    tensors = {name: to_torch(torch, value) for name, value in call.items()}
    got = topkey.mqa_topk(**tensors, causal=True, exec=on)
    for name in OUT:
        array = getattr(got, name)
        assert isinstance(array, torch.Tensor) and array.numpy().tobytes() == getattr(want, name).tobytes()


def test_strided_tensors_and_outputs(torch, on):
    call = call_of("bf16")
    want = topkey.mqa_topk(**call, exec=on)
    tensors = {name: to_torch(torch, value) for name, value in call.items()}
    wide = torch.zeros(60, 40, dtype=torch.bfloat16)
    wide[::2, :32] = tensors["k"]
    buffer = torch.full((6, 9), 77, dtype=torch.int32)
    got = topkey.mqa_topk(**(tensors | {"k": wide[::2, :32], "out": {"indices": buffer[1:5, 2:]}}), exec=on)
    assert got.indices.data_ptr() == buffer[1:5, 2:].data_ptr()
    assert buffer[1:5, 2:7].tolist() == want.indices.tolist()
    assert (buffer == 77).sum() == 6 * 9 - 4 * 5


def test_producers_make_tensors(torch, on):
    x = torch.linspace(-4, 4, 4 * 64, dtype=torch.bfloat16).reshape(4, 64)
    values, scales = topkey.quantize_k(x, exec=on)
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    as_numpy = topkey.quantize_k(x.float().numpy(), exec=on)
    assert values.view(torch.uint8).tolist() == as_numpy[0].view(np.uint8).tolist()
    cache = topkey.KeyCache(torch.zeros(2, 4, 68, dtype=torch.uint8), 4, 64)
    topkey.store_k(x, torch.arange(4), cache, exec=on)
    back, back_scales = topkey.gather_k(
        cache, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32), total=4, exec=on
    )
    assert back.view(torch.uint8).equal(values.view(torch.uint8)) and back_scales.equal(scales)


def test_meta_tensors_answer_questions_only(torch):
    shapes = {"q": torch.empty(8, 4, 64, device="meta"), "k": torch.empty(100, 64, device="meta")}
    shapes |= {"weights": torch.empty(8, 4, device="meta"), "topk": 16}
    real = {name: torch.zeros_like(value, device="cpu") if name != "topk" else value for name, value in shapes.items()}
    assert topkey.workspace_bytes("mqa_topk", **shapes) == topkey.workspace_bytes("mqa_topk", **real)
    assert topkey.unsupported("mqa_topk", **shapes) is None
    with pytest.raises(ValueError, match="mqa_topk: q must be on cpu or cuda, got a tensor on meta"):
        topkey.mqa_topk(**shapes)


def test_refused_tensors(torch):
    scores = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"topk: scores must be of a dtype that TopKey has \(.*\), got float64"):
        topkey.topk(scores.double(), 2)
    with pytest.raises(ValueError, match="topk: scores must be a tensor with memory and strides"):
        topkey.topk(scores.to_sparse(), 2)
    with pytest.raises(ValueError, match=r"topk: scores must be f32\|f16\|bf16 .*last stride 2"):
        topkey.topk(torch.zeros(2, 8)[:, ::2], 2)


def test_selections_and_traces_of_tensors(torch, tmp_path):
    a = topkey.Selection(torch.tensor([[0, 2, -1]], dtype=torch.int32))
    b = topkey.Selection(torch.tensor([[2, 3, 0]], dtype=torch.int32))
    assert a.to_mask(4).tolist() == [[True, False, True, False]]
    assert a.overlap(b).tolist() == [pytest.approx(2 / 3)]
    tokens = a.tokens(pool_size=2, end=torch.tensor([7], dtype=torch.int32)).indices
    assert tokens.dtype == torch.int32 and tokens.tolist() == [[0, 1, 4, 5, -1, -1, 6]]
    call = {name: to_torch(torch, value) for name, value in call_of("fp8").items()}
    trace = topkey.trace_of("mqa_topk", **call)
    topkey.save_trace(tmp_path / "numpy", trace)
    tensors = {name: to_torch(torch, value) for name, value in trace.tensors.items()}
    topkey.save_trace(tmp_path / "torch", topkey.Trace(tensors, trace.metadata))
    assert (tmp_path / "numpy").read_bytes() == (tmp_path / "torch").read_bytes()


def test_gpu_tensors(torch):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    scores = torch.arange(16.0, device="cuda").reshape(2, 8)
    if any(b.device == "cuda" and not b.unusable for b in topkey.backends()):
        assert topkey.topk(scores, 2).indices.tolist() == [[6, 7], [6, 7]]
    else:
        with pytest.raises(RuntimeError, match="topk: no backend can run this: .*the call on cuda"):
            topkey.topk(scores, 2)
    with pytest.raises(ValueError, match="topk: .* must be on the device of the other arrays, cuda:0, got cpu"):
        topkey.topk(scores, 2, end=torch.zeros(2, dtype=torch.int32))


def test_pages_of_tensors(torch, on):
    rng = np.random.default_rng(1)
    p = problem(rng, "fp8", 2, 2, 32, 9)
    cache, table = paged(rng, p, [9], 4)
    rest = {"block_table": table, "end": np.array([8, 9], np.int32), "request": np.zeros(2, np.int32)}
    want = topkey.paged_mqa_topk(p.arguments["q"], cache, p.arguments["weights"], 3, **rest, exec=on)
    pages = to_torch(torch, np.ascontiguousarray(cache.pages)).view(-1, 4, 36)
    got = topkey.paged_mqa_topk(
        to_torch(torch, p.arguments["q"]), cache._replace(pages=pages), to_torch(torch, p.arguments["weights"]), 3,
        **{name: torch.from_numpy(value) for name, value in rest.items()}, exec=on,
    )  # fmt: skip
    assert got.indices.tolist() == want.indices.tolist()


def all_to_torch(torch, values):
    """Arrays inside tuples, dicts and a StepMetadata as tensors of the same memory."""
    if isinstance(values, topkey.StepMetadata):
        return topkey.StepMetadata(*(to_torch(torch, value) for value in values))
    if isinstance(values, dict):
        return {name: all_to_torch(torch, value) for name, value in values.items()}
    return tuple(all_to_torch(torch, v) for v in values) if isinstance(values, tuple) else to_torch(torch, values)


@pytest.mark.parametrize("fp4", [False, True])
def test_a_layer_on_tensors(torch, on, fp4):
    s = Serving(np.random.default_rng(1), fp4)
    buffer, pages = torch.from_numpy(s.buffer), torch.from_numpy(s.pages)
    layer = topkey.SparseAttnIndexer(pages, D, "ue8m0", TOPK, D, 36, 1000, buffer, use_fp4_cache=fp4)
    memory = torch.zeros(layer.workspace_bytes(32, 4, 36), dtype=torch.uint8)
    for new in ([9, 0, 5, 0], [1, 7, 1, 0], [0, 0, 0, 0]):
        s.buffer[:] = 77
        step = s.step(new, padding=1)
        tensors = all_to_torch(torch, tuple(step[1:5]))
        metadata = all_to_torch(torch, step.metadata)
        assert layer.forward(*tensors, metadata=metadata, workspace=memory, exec=on) is buffer
        s.check(step)
    none = s.step([0, 0, 0, 0])
    layer.forward(*all_to_torch(torch, tuple(none[1:5])), metadata=all_to_torch(torch, none.metadata), exec=on)
    with pytest.raises(ValueError, match="topk_indices_buffer must be i32"):
        topkey.SparseAttnIndexer(pages, D, "ue8m0", TOPK, D, 36, 1000, torch.zeros(4, 9), use_fp4_cache=fp4)


def test_a_kpool_layer_on_tensors(torch, on):
    s = Sequence(np.random.default_rng(2), 4)
    buffer, pages, tail = (to_torch(torch, array) for array in (s.buffer, s.pages, s.tail))
    layer = topkey.SparseAttnIndexerKpool(pages, D, "ue8m0", 8, D, 44, 1000, buffer, tail_cache=tail)
    for new in ([9, 6, 0], [1, 7, 5], [1, 1, 1], [20, 0, 1]):
        rows, arrays, given = s.step(new, padding=1)
        layer.forward(*all_to_torch(torch, arrays), **all_to_torch(torch, given), exec=on)
    cache = topkey.KeyCache(s.cache_of_the_whole(on), 4, D)
    assert s.buffer[: len(rows)].tolist() == s.answer(rows, arrays[1], arrays[3], cache, on)


def test_a_step_with_a_meta_tensor_writes_nothing(torch, on):
    s = Serving(np.random.default_rng(3))
    layer = topkey.SparseAttnIndexer(torch.from_numpy(s.pages), D, None, TOPK, D, 36, 1000, torch.from_numpy(s.buffer))
    step, pages = s.step([3, 1, 0, 2]), s.pages.copy()
    metadata = all_to_torch(torch, step.metadata)
    k, w = to_torch(torch, step.k), to_torch(torch, step.w).to("meta")
    with pytest.raises(ValueError, match="SparseAttnIndexer: weights must be on cpu or cuda, got a tensor on meta"):
        layer.forward(step.hidden, to_torch(torch, step.q), k, w, metadata=metadata, exec=on)
    assert (s.buffer == 77).all() and s.pages.tobytes() == pages.tobytes()


def test_a_layer_on_a_gpu(torch):
    if not torch.cuda.is_available() or not any(b.device == "cuda" and not b.unusable for b in topkey.backends()):
        pytest.skip("no GPU that torch and TopKey see")
    s = Serving(np.random.default_rng(4))
    buffer, pages = torch.from_numpy(s.buffer).cuda(), torch.from_numpy(s.pages).cuda()
    layer = topkey.SparseAttnIndexer(pages, D, "ue8m0", TOPK, D, 36, 1000, buffer)
    memory = torch.zeros(layer.workspace_bytes(32, 4, 36), dtype=torch.uint8, device="cuda")
    for new in ([9, 0, 5, 0], [1, 7, 1, 0]):
        buffer.fill_(77)
        step = s.step(new, padding=1)
        hidden, q, k, w = (to_torch(torch, array).cuda() for array in step[1:5])
        given = (to_torch(torch, value) for value in step.metadata)
        metadata = topkey.StepMetadata(*(v.cuda() if isinstance(v, torch.Tensor) else v for v in given))
        layer.forward(hidden, q, k, w, metadata=metadata, workspace=memory)
        s.buffer[:] = buffer.cpu().numpy()
        s.check(step)
