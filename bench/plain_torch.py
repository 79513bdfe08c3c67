#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""What plain torch takes on the CPU for the calls of `topkey bench`, beside what TopKey takes, in one run.

Plain means: keys dequantised, one product, relu, weighted sum over heads, torch.topk. Both ways of a row at a time or
all at once are tried and the faster one counts. Keys are dense for torch: it gets them gathered for nothing.

    bench/plain_torch.py --topkey build/topkey --threads 2 [--json FILE]
"""
import argparse
import json
import statistics
import subprocess
import tempfile
import time

import torch

HEADS, DIM, TOPK = 64, 128, 2048
# name in `topkey bench`, rows, keys, causal
CASES = [("decode 1", 1, 65536, False), ("decode 8", 8, 65536, False), ("prefill", 256, 16384, True)]


def problem(rows, keys):
    torch.manual_seed(1)
    q = torch.randn(rows, HEADS, DIM).to(torch.float8_e4m3fn)
    k = torch.randn(keys, DIM)
    scale = k.abs().amax(1, keepdim=True) / 448
    return q, (k / scale).to(torch.float8_e4m3fn), scale, torch.randn(rows, HEADS)


def search(q, k, scale, weights, causal, rows_at_once):
    keys = k.float() * scale
    found = []
    for first in range(0, len(q), rows_at_once):
        part = q[first : first + rows_at_once].float()
        dots = torch.einsum("rhd,nd->rhn", part, keys).relu_()
        scores = torch.einsum("rhn,rh->rn", dots, weights[first : first + rows_at_once])
        if causal:
            last = torch.arange(first, first + len(part)) + len(k) - len(q)
            scores.masked_fill_(torch.arange(len(k))[None] > last[:, None], float("-inf"))
        found.append(scores.topk(TOPK, sorted=False).indices.int())
    return torch.cat(found)


def median_us(call):
    call()
    seconds, begin = [], time.perf_counter()
    while len(seconds) < 5 or (time.perf_counter() - begin < 1 and len(seconds) < 1000):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def ours(args, name):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [args.topkey, "bench", "--threads", str(args.threads), "--only", name, "--json", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = json.load(open(file.name))["rows"]
    return next(row["median_us"] for row in rows if row["case"] == name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topkey", default="build/topkey")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = []
    print(f"torch {torch.__version__}, {args.threads} threads, H = {HEADS}, D = {DIM}, topk {TOPK}, fp8 keys")
    for name, rows, keys, causal in CASES:
        q, k, scale, weights = problem(rows, keys)
        plain = min(median_us(lambda n=n: search(q, k, scale, weights, causal, n)) for n in {1, rows})
        mine = ours(args, name)
        table.append({"case": name, "rows": rows, "keys": keys, "torch_us": plain, "topkey_us": mine, "times": plain / mine})
        print(f"{name:<10} {rows} x {keys}: torch {plain:.0f} us, topkey {mine:.0f} us, {plain / mine:.2f} times", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "threads": args.threads, "rows": table}, file, indent=1)


if __name__ == "__main__":
    main()
