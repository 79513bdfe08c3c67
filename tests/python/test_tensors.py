# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The way of a tensor where torch is not installed: a stand-in with the attributes of torch's that are used. The real one
is tested in test_torch.py."""

import sys
import types

import numpy as np
import pytest
import topkey

Q, WEIGHTS = np.float32([[[1, 0], [0, 1]]]), np.float32([[1, 0.5]])
KEYS = np.float32([[3, 1], [-2, 4], [0, 0], [1, 5], [6, -1], [-7, 0]])


class Named:
    def __init__(self, text, **attributes):
        self.text = text
        vars(self).update(attributes)

    def __repr__(self):
        return self.text


class Tensor:
    __module__ = "torch"

    def __init__(self, array, device="cpu"):
        self.array, self.shape = array, array.shape
        self.dtype = getattr(sys.modules["torch"], array.dtype.name)
        self.device = Named(device, type=device, index=0 if device == "cuda" else None)
        self.is_cpu = device == "cpu"

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def data_ptr(self):
        return 0 if self.device.type == "meta" else self.array.ctypes.data


@pytest.fixture(autouse=True)
def torch(monkeypatch):
    names = ("float32", "int32", "int64", "uint8", "float64")
    module = types.ModuleType("torch")
    vars(module).update({name: Named(f"torch.{name}") for name in names}, Tensor=Tensor)
    module.empty = lambda shape, dtype, device: Tensor(np.empty(shape, repr(dtype).removeprefix("torch.")), device.type)
    module.arange = lambda first, last, dtype, device: Tensor(np.arange(first, last, dtype=np.int32), device.type)
    module.cuda = Named("cuda", asked=[])
    module.cuda.current_stream = lambda device: module.cuda.asked.append(device) or Named("stream", cuda_stream=0x1234)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_tensors_in_tensors_out():
    got = topkey.mqa_topk(*map(Tensor, (Q, KEYS, WEIGHTS)), 3, causal=True, out=("indices", "scores"))
    assert type(got.indices) is Tensor and got.indices.array.tolist() == [[0, 3, 4]]
    assert got.scores.array.tolist() == [[3.5, 3.5, 6]]
    out = np.zeros((1, 8), np.int32)
    topkey.mqa_topk(*map(Tensor, (Q, KEYS, WEIGHTS)), 3, out={"indices": Tensor(out[:, 2:6])})
    assert out.tolist() == [[0, 0, 0, 3, 4, 0, 0, 0]]


def test_meta_tensors_answer_questions_only():
    meta = {"q": Tensor(Q, "meta"), "k": Tensor(KEYS, "meta"), "weights": Tensor(WEIGHTS, "meta"), "topk": 3}
    real = {"q": Q, "k": KEYS, "weights": WEIGHTS, "topk": 3}
    assert topkey.workspace_bytes("mqa_topk", **meta) == topkey.workspace_bytes("mqa_topk", **real) > 0
    with pytest.raises(ValueError, match="mqa_topk: q must be on cpu or cuda, got a tensor on meta"):
        topkey.mqa_topk(**meta)


def test_gpu_tensors_go_to_the_current_stream_and_end_where_no_backend_takes_them(torch):
    if any(b.device == "cuda" and not b.unusable for b in topkey.backends()):
        pytest.skip("a stand-in has no GPU memory")
    scores = Tensor(np.ones((2, 4), np.float32), "cuda")
    with pytest.raises(RuntimeError, match="topk: no backend can run this: .*the call on cuda"):
        topkey.topk(scores, 2)
    assert torch.cuda.asked == [0]
    with pytest.raises(ValueError, match="topk: end must be on the device of the other arrays, cuda:0, got cpu"):
        topkey.topk(scores, 2, end=Tensor(np.ones(2, np.int32)))


def test_refused_tensors():
    with pytest.raises(ValueError, match="topk: scores must be on cpu or cuda, got a tensor on mps"):
        topkey.topk(Tensor(np.ones((2, 4), np.float32), "mps"), 2)
    with pytest.raises(ValueError, match=r"topk: scores must be of a dtype that TopKey has \(.*\), got float64"):
        topkey.topk(Tensor(np.ones((2, 4))), 2)
    sparse = Tensor(np.ones((2, 4), np.float32))
    sparse.stride = lambda: (_ for _ in ()).throw(RuntimeError("sparse tensors have no strides"))
    with pytest.raises(ValueError, match=r"must be a tensor with memory and strides, got Tensor \(sparse tensors have"):
        topkey.topk(sparse, 2)
