# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Traces from Python are the command's, byte for byte."""

import os
import pathlib
import subprocess

import ml_dtypes
import numpy as np
import pytest
import topkey
from data import paged, problem
from formulas.selection import bits_equal

SOURCE = pathlib.Path(__file__).parents[2]
COMMAND = os.environ.get("TOPKEY_CLI")


def command(*arguments):
    """Runs the command line of the same build; TOPKEY_CLI names it (scripts/test_python sets it)."""
    assert COMMAND, "TOPKEY_CLI must name the command line, as build/topkey"
    return subprocess.run([COMMAND, *map(str, arguments)], check=True, capture_output=True, text=True)


@pytest.mark.parametrize("name", sorted(p.name for p in SOURCE.glob("data/*.safetensors")))
def test_a_loaded_trace_is_saved_as_it_was(name, tmp_path):
    """Not byte for byte: other writers order the header otherwise."""
    trace = topkey.load_trace(SOURCE / "data" / name)
    topkey.save_trace(tmp_path / name, trace)
    again = topkey.load_trace(tmp_path / name)
    assert again.metadata == trace.metadata and again.tensors.keys() == trace.tensors.keys()
    assert all(bits_equal(again.tensors[key], array) for key, array in trace.tensors.items())


def test_the_commands_own_file(tmp_path):
    command("make-trace", "-o", tmp_path / "made.safetensors")
    trace = topkey.load_trace(tmp_path / "made.safetensors")
    assert trace.metadata["topkey_trace"] == "1" and trace.tensors["q"].dtype == ml_dtypes.float8_e4m3fn
    topkey.save_trace(tmp_path / "saved.safetensors", trace)
    assert (tmp_path / "saved.safetensors").read_bytes() == (tmp_path / "made.safetensors").read_bytes()


def test_a_call_as_a_trace_runs_in_the_command_with_the_same_bits(tmp_path):
    rng = np.random.default_rng(0)
    p = problem(rng, "fp8", 4, 2, 32, 30, exact=False)
    cache, table = paged(rng, p, [30], 4)
    call = {
        "q": p.arguments["q"], "cache": cache, "weights": p.arguments["weights"], "topk": 6, "block_table": table,
        "end": np.array([27, 28, 29, 30], np.int32), "request": np.zeros(4, np.int32), "order": "score",
        "out": ("indices", "scores"), "exec": topkey.Exec(backend="cpu"),
    }  # fmt: skip
    topkey.save_trace(tmp_path / "call.safetensors", topkey.trace_of("paged_mqa_topk", **call))
    command("run", tmp_path / "call.safetensors", "--backend", "cpu", "-o", tmp_path / "ran.safetensors")
    results = topkey.load_trace(tmp_path / "ran.safetensors").tensors
    got = topkey.paged_mqa_topk(**call)
    assert bits_equal(results["indices"], got.indices) and bits_equal(results["scores"], got.scores)


def test_trace_of_every_kind_of_argument():
    shard = topkey.Shard(1, 2, 3)
    slots = topkey.trace_of(
        "to_slots", indices=np.zeros((2, 3), np.int32), block_table=np.zeros((2, 1), np.int32), page_size=4, shard=shard
    )
    assert slots.metadata["shard.rank"] == "1" and slots.metadata["shard.interleave"] == "3"
    q = topkey.trace_of(
        "quantize_q", q=np.ones((1, 1, 32), ml_dtypes.bfloat16), weights=np.ones((1, 1), np.float32), softmax_scale=0.5,
        rope=topkey.Rope(np.zeros(1, np.int64), np.ones((2, 8), np.float32), 8, where="trailing"),
    )  # fmt: skip
    assert q.metadata["softmax_scale"] == "0.5" and q.metadata["rope.trailing"] == "1"
    assert q.tensors["q"].dtype == ml_dtypes.bfloat16 and q.tensors["positions"].tolist() == [0]
    with pytest.raises(ValueError, match="topk: order must be one of"):
        topkey.trace_of("topk", scores=np.ones((1, 2), np.float32), topk=1, order="none")


def test_unknown_tensors_and_dtypes_are_kept(tmp_path):
    tensors = {
        "f64": np.arange(3.0), "i16": np.arange(4, dtype=np.int16), "flag": np.array([True, False]),
        "e5m2": np.ones(5, ml_dtypes.float8_e5m2), "empty": np.zeros((0, 3), np.float32), "scalar": np.array(7, np.int64),
        "transposed": np.arange(6, dtype=np.int32).reshape(2, 3).T, "f4": topkey.Packed("F4", (2, 4), b"\x12\x34\x56\x78"),
    }  # fmt: skip
    topkey.save_trace(tmp_path / "x", topkey.Trace(tensors, {"note": "kept ⏎"}))
    back = topkey.load_trace(tmp_path / "x")
    assert back.metadata == {"note": "kept ⏎"} and back.tensors["f4"] == tensors.pop("f4")
    for name, array in tensors.items():
        assert back.tensors[name].shape == array.shape and back.tensors[name].dtype == array.dtype
        assert back.tensors[name].tobytes() == np.ascontiguousarray(array).tobytes()


def test_files_that_are_no_traces(tmp_path):
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ValueError, match="too short to be a safetensors file"):
        topkey.load_trace(tmp_path / "short")
    with pytest.raises(ValueError, match="there is no such file"):
        topkey.load_trace(tmp_path / "none")
    with pytest.raises(
        ValueError, match="save_trace: tensor 'x' must be of a dtype that safetensors has, got complex128"
    ):
        topkey.save_trace(tmp_path / "x", topkey.Trace({"x": np.zeros(2, complex)}, {}))
    assert not (tmp_path / "x").exists()


def test_big_endian_arrays_keep_their_values(tmp_path):
    path = tmp_path / "big.safetensors"
    topkey.save_trace(path, topkey.Trace({"a": np.arange(3, dtype=">i4")}, {}))
    assert topkey.load_trace(path).tensors["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("trace", "sentence"),
    [
        (topkey.Trace({"__metadata__": np.zeros(1)}, {}), "a tensor's name must be a string other than __metadata__"),
        (topkey.Trace({3: np.zeros(1)}, {}), "a tensor's name must be a string"),
        (topkey.Trace({}, {"seed": 1}), "metadata must be strings, got 'seed': 1"),
    ],
)
def test_what_no_one_could_read_is_not_written(tmp_path, trace, sentence):
    path = tmp_path / "kept.safetensors"
    topkey.save_trace(path, topkey.Trace({}, {"a": "b"}))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=sentence):
        topkey.save_trace(path, trace)
    assert path.read_bytes() == before


def test_a_path_is_not_cut_at_nul(tmp_path):
    for call in (lambda: topkey.save_trace(f"{tmp_path}/x\0y", topkey.Trace({}, {})), lambda: topkey.load_trace("x\0y")):
        with pytest.raises(ValueError, match="path must be without NUL"):
            call()
