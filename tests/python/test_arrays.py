# SPDX-License-Identifier: Apache-2.0 OR MIT
"""How arrays cross: without a copy, whatever their strides; ml_dtypes, plain buffers, DLPack; what is refused."""

import array
import ctypes

import ml_dtypes
import numpy as np
import pytest
import topkey
from data import paged, problem
from formulas.selection import bits_equal


class OnlyDlpack:
    """An array of a framework that TopKey does not know."""

    def __init__(self, array, **options):
        self._array, self._options = array, options
        self.shape = array.shape

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**(options | self._options))

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.fixture
def call():
    p = problem(np.random.default_rng(0), "fp8", 3, 2, 32, 20)
    return dict(p.arguments) | p.dense | {"topk": 4}


def apart(x, spare=3):
    """The same values with other strides: rows two apart, spare columns."""
    wide = np.zeros((2 * x.shape[0], *x.shape[1:-1], x.shape[-1] + spare), x.dtype)
    view = wide[::2, ..., : x.shape[-1]]
    view[...] = x
    return view


def test_strides_change_no_bit(call, on):
    want = topkey.mqa_topk(**call, exec=on)
    strided = {name: apart(call[name]) for name in ("q", "k", "weights")}
    scales = np.repeat(call["k_scales"], 3)[::3]
    assert scales.strides != call["k_scales"].strides and strided["k"].dtype == ml_dtypes.float8_e4m3fn
    assert bits_equal(topkey.mqa_topk(**(call | strided | {"k_scales": scales}), exec=on).indices, want.indices)


def test_results_go_where_they_are_asked_for(call, on):
    buffer = np.full((5, 9), 77, np.int32)
    counts = np.full(6, 77, np.int32)[::2]
    got = topkey.mqa_topk(**call, out={"indices": buffer[1:4, 2:], "counts": counts}, exec=on)
    assert got.indices.base is buffer and got.counts is counts and got.scores is None
    want = np.full((5, 9), 77, np.int32)
    want[1:4, 2:6] = topkey.mqa_topk(**call, exec=on).indices
    assert bits_equal(buffer, want) and counts.tolist() == [4, 4, 4]


def test_bytes_stand_for_codes(call, on):
    want = topkey.mqa_topk(**call, exec=on).indices
    for kind in (np.uint8, np.int8):
        seen = {"q": call["q"].view(kind), "k": call["k"].view(kind)}
        assert bits_equal(topkey.mqa_topk(**(call | seen), exec=on).indices, want)
    with pytest.raises(ValueError, match="mqa_topk: format must be given for keys in bytes, got None"):
        topkey.mqa_topk(**(call | {"k": call["k"].view(np.uint8), "format": None}), exec=on)


def test_the_format_follows_from_the_dtype(on):
    for format in ("bf16", "f16", "f32"):
        p = problem(np.random.default_rng(1), format, 2, 1, 32, 9)
        want = topkey.mqa_topk(**p.arguments, **p.dense, topk=3, exec=on)
        got = topkey.mqa_topk(p.arguments["q"], p.dense["k"], p.arguments["weights"], 3, exec=on)
        assert bits_equal(got.indices, want.indices)


def test_plain_buffers_and_dlpack(call, on):
    scores = np.array([[3, 1, 2, 5]], np.float32)
    buffer = memoryview(array.array("f", scores[0])).cast("B").cast("f", (1, 4))
    end = array.array("i", [3])
    for form in (buffer, OnlyDlpack(scores)):
        got = topkey.topk(form, 2, end=end, exec=on)
        assert type(got.indices) is np.ndarray and got.indices.tolist() == [[0, 2]]
    out = np.zeros((1, 2), np.int32)
    topkey.topk(OnlyDlpack(scores), 2, out={"indices": OnlyDlpack(out)}, exec=on)
    assert out.tolist() == [[0, 3]]


def test_read_only_inputs_are_fine_and_outputs_are_not(call, on):
    for name in ("q", "k", "weights", "k_scales"):
        call[name].flags.writeable = False
    out = np.zeros((3, 4), np.int32)
    want = topkey.mqa_topk(**call, out={"indices": out}, exec=on)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"mqa_topk: out.indices must be an array that can be written, got ndarray"):
        topkey.mqa_topk(**call, out={"indices": out}, exec=on)
    with pytest.raises(
        ValueError, match=r"out.indices must be an array that DLPack exports, got OnlyDlpack \(.*readonly"
    ):
        topkey.mqa_topk(**call, out={"indices": OnlyDlpack(out)}, exec=on)
    # A newer DLPack says that an array is read-only: fine for an input.
    with pytest.raises(ValueError, match="must be an array that DLPack exports for writing, got OnlyDlpack"):
        topkey.mqa_topk(**call, out={"indices": OnlyDlpack(out, max_version=(1, 0))}, exec=on)
    weights = OnlyDlpack(call["weights"], max_version=(1, 0))
    assert bits_equal(topkey.mqa_topk(**(call | {"weights": weights}), exec=on).indices, want.indices)


def test_caches_as_engines_allocate_them(on):
    rng = np.random.default_rng(2)
    p = problem(rng, "fp8", 2, 2, 32, 9)
    cache, table = paged(rng, p, [9], 4)
    rest = {"block_table": table, "end": np.array([9, 9], np.int32), "request": np.zeros(2, np.int32), "exec": on}
    want = topkey.paged_mqa_topk(p.arguments["q"], cache, p.arguments["weights"], 3, **rest).indices
    shapes = [
        cache.pages.reshape(-1, 4, 36),
        cache.pages.reshape(-1, 4, 1, 36),
        cache.pages.view(ml_dtypes.float8_e4m3fn),
    ]
    for pages in (*shapes, cache.pages.view(np.int8), apart(cache.pages, 4)[:, None]):
        got = topkey.paged_mqa_topk(p.arguments["q"], cache._replace(pages=pages), p.arguments["weights"], 3, **rest)
        assert bits_equal(got.indices, want)
    parted = np.zeros((len(cache.pages), 4, 40), np.uint8)[:, :, :36]
    with pytest.raises(ValueError, match=r"cache must be \[P, bytes\], or contiguous inside a page"):
        topkey.paged_mqa_topk(p.arguments["q"], cache._replace(pages=parted), p.arguments["weights"], 3, **rest)


def odd_strides(x):
    """f32 elements 5 bytes apart."""
    return np.zeros(x.shape, np.dtype([("value", "<f4"), ("pad", "u1")]))["value"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: x[::-1], r"weights must be an array without negative strides, got strides of \(-2, 1\) elements"),
        (odd_strides, r"weights must be an array with strides in whole elements, got a stride of 10 bytes"),
        (lambda x: x.astype(np.float64), r"weights must be of a dtype that TopKey has \(float32, .*\), got float64"),
        (
            lambda x: x.astype(">f4"),
            r"weights must be of a dtype that TopKey has \(float32, .*\), got byte-swapped float32",
        ),
        (lambda x: x.reshape(1, 1, 1, 3, 2), r"weights must be of at most 4 dimensions, got 5"),
    ],
)
def test_refused_arrays(call, on, change, sentence):
    with pytest.raises(ValueError, match="mqa_topk: " + sentence):
        topkey.mqa_topk(**(call | {"weights": change(call["weights"])}), exec=on)


@pytest.mark.parametrize("value", [[[1.0, 2.0]], 3, 2.5, "x", {}, object(), np.float32], ids=repr)
def test_what_is_no_array_is_a_wrong_argument(call, on, value):
    got = type(value).__name__
    for name in ("q", "weights", "end", "mask", "index_base"):
        with pytest.raises(ValueError, match=f"mqa_topk: {name} must be an array, got {got}"):
            topkey.mqa_topk(**(call | {name: value}), exec=on)
    with pytest.raises(ValueError, match=f"mqa_topk: out.indices must be an array, got {got}"):
        topkey.mqa_topk(**(call | {"out": {"indices": value}}), exec=on)
    for name in ("stats", "workspace"):
        with pytest.raises(ValueError, match=f"mqa_topk: exec.{name} must be an array, got {got}"):
            topkey.mqa_topk(**call, exec=on._replace(**{name: value}))
    with pytest.raises(ValueError, match="mqa_topk: weights must be (an array|of a dtype that TopKey has)"):
        topkey.workspace_bytes("mqa_topk", **(call | {"weights": value}), exec=on)


class OnGpu:
    """An array that says it lives on a GPU: enough to see where a call of such arrays goes."""

    class Managed(ctypes.Structure):  # DLManagedTensor
        _fields_ = [
            ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
            ("dtype", ctypes.c_uint8 * 2), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
            ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        ]  # fmt: skip

    def __init__(self, code, shape):
        self.shape, self.streams = shape, []
        self._extents = (ctypes.c_int64 * len(shape))(*shape)
        self._made = self.Managed(
            256, (2, 0), len(shape), code, 1, ctypes.addressof(self._extents), None, 0, None, None
        )  # fmt: skip

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, *, stream=None, **_):
        self.streams.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._made), b"dltensor", None)


def test_gpu_arrays_end_in_a_clear_error_where_no_backend_takes_them():
    if any(b.device == "cuda" and not b.unusable for b in topkey.backends()):
        return  # tests/gpu has these calls
    scores, out = OnGpu((2, 32), (2, 8)), OnGpu((0, 32), (2, 3))
    with pytest.raises(RuntimeError, match="topk: no backend can run this: .*the call on cuda"):
        topkey.topk(scores, 3, out={"indices": out})
    assert scores.streams == [-1]
    with pytest.raises(
        ValueError, match="topk: out.indices must be on the device of the other arrays, cuda:0, got cpu"
    ):
        topkey.topk(scores, 3, out={"indices": np.zeros((2, 3), np.int32)})
