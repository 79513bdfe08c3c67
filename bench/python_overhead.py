#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""What a call from Python costs beside the call itself: the whole operation on numpy arrays against its C symbol with the
arguments ready. The shapes are so small that the work is next to nothing.
The best round counts: others share the machine. Usage: python bench/python_overhead.py"""

import time

import ml_dtypes
import numpy as np
import topkey
from topkey import calls

ROUNDS, CALLS = 101, 100


def c_call(call, options):
    """Seconds of the C symbol alone for the same arguments."""
    seconds = []

    def ask(op, fields, exec):
        calls._native.run(op, fields, exec)
        for _ in range(ROUNDS):
            seconds.append(calls._native.time_calls(op, fields, exec, CALLS) / CALLS)

    try:
        call(**options, exec=calls.Question(ask, topkey.Exec(threads=1), allocates=True))
    except calls.Answer:
        return min(seconds)


def whole_call(call, options):
    exec, seconds = topkey.Exec(threads=1), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call(**options, exec=exec)
        seconds.append((time.perf_counter() - start) / CALLS)
    return min(seconds)


def cases():
    f32, i32, fp8 = np.float32, np.int32, ml_dtypes.float8_e4m3fn
    q, k, weights = np.ones((1, 2, 32), f32), np.ones((4, 32), f32), np.ones((1, 2), f32)
    window = {"start": np.zeros(1, i32), "end": np.full(1, 4, i32)}
    outputs = {"indices": np.empty((1, 4), i32), "scores": np.empty((1, 4), f32)}
    three = {"q": q, "k": k, "weights": weights, "topk": 4}
    yield "mqa_topk, 3 arrays, 1 made", topkey.mqa_topk, three
    five = three | window
    yield "mqa_topk, 5 arrays, 3 made", topkey.mqa_topk, five | {"out": ("indices", "scores", "counts")}
    eight = five | {"index_base": np.zeros(1, i32), "out": outputs}
    yield "mqa_topk, 8 arrays, 2 of them filled", topkey.mqa_topk, eight
    codes = {"q": q.astype(fp8), "k": k.astype(fp8), "k_scales": np.ones(4, f32)}
    yield "mqa_topk, 8 arrays, 2 of them ml_dtypes", topkey.mqa_topk, three | window | codes | {"out": outputs}
    cache = topkey.KeyCache(np.zeros((1, 4 * 36), np.uint8), 4, 32)
    paged = {"q": codes["q"], "cache": cache, "weights": weights, "topk": 4, "block_table": np.zeros((1, 1), i32)}
    paged |= {"end": window["end"], "max_len": 4, "request": np.zeros(1, i32), "out": outputs}
    yield "paged_mqa_topk, 8 arrays, 1 of them ml_dtypes", topkey.paged_mqa_topk, paged


print(f"best of {ROUNDS} rounds of {CALLS} calls, backend {next(b.name for b in topkey.backends() if not b.unusable)}, microseconds")
print(f"{'':48}{'Python':>8}{'C':>8}{'over':>8}")
for name, call, options in cases():
    whole, alone = whole_call(call, options), c_call(call, options)
    print(f"{name:48}{whole * 1e6:8.2f}{alone * 1e6:8.2f}{(whole - alone) * 1e6:8.2f}")
