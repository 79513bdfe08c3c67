#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Times TopKey beside other people's kernels, where they are installed: same process, same tensors, in turn, as CUDA graphs
with L2 flushed before each. `topkey bench --against PEERS` runs it. A peer that is not installed is listed as absent, one
that does not take a call as failed, with what it said; nothing of them is built or shipped here. A peer without logits of
its own (vllm, flashinfer, sgl_kernel) selects from those of deep_gemm, or, without that, from TopKey's, and says so.

    bench/against.py --against deep_gemm,flashinfer,vllm,sgl_kernel [--quick] [--backend NAME] [--json FILE]
"""
import argparse
import importlib
import json
import statistics
import sys

try:
    import topkey
    import torch
except Exception as error:  # one that is there may still fail to load its library
    print(f"topkey: bench: --against needs the Python packages topkey and torch: {error}", file=sys.stderr)
    sys.exit(3)

DIM, PAGE, FLUSH_BYTES = 128, 64, 256 << 20
PEERS = ("deep_gemm", "flashinfer", "vllm", "sgl_kernel")
# (rows, keys, causal: the last rows of the keys, out of a matrix; else a request each, out of pages)
CASES = [(1, 8192, False), (1, 131072, False), (16, 32768, False), (64, 32768, False), (64, 131072, False),
         (2048, 8192, True), (2048, 32768, True), (8192, 65536, True)]  # fmt: skip
QUICK = [(1, 8192, False), (16, 32768, False), (2048, 8192, True)]


class Problem:
    """Random normal fp8 data, H = 64, D = 128, pages of 64 keys in shuffled order."""

    def __init__(self, rows, keys, causal, topk):
        torch.manual_seed(1)
        self.rows, self.keys, self.causal, self.topk = rows, keys, causal, topk
        self.name = f"{'prefill' if causal else 'decode'} {rows} x {keys}"
        self.q = torch.randn(rows, 64, DIM, device="cuda").to(torch.float8_e4m3fn)
        self.weights = torch.randn(rows, 64, device="cuda") * 0.01
        self.indices = torch.empty(rows, topk, dtype=torch.int32, device="cuda")
        if causal:
            self.k = torch.randn(keys, DIM, device="cuda").to(torch.float8_e4m3fn)
            self.scales = torch.rand(keys, device="cuda") * 0.01 + 0.001
            self.start = torch.zeros(rows, dtype=torch.int32, device="cuda")
            self.end = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device="cuda")
            return
        pages = rows * keys // PAGE
        self.cache = torch.empty(pages, PAGE * (DIM + 4), dtype=torch.uint8, device="cuda")
        for page in range(0, pages, 4096):
            part = self.cache[page : page + 4096]
            codes = torch.randn(len(part), PAGE * DIM, device="cuda").to(torch.float8_e4m3fn)
            part[:, : PAGE * DIM] = codes.view(torch.uint8)
            scales = torch.rand(len(part), PAGE, device="cuda") * 0.01 + 0.001
            part[:, PAGE * DIM :] = scales.view(torch.uint8)
        self.table = torch.randperm(pages, device="cuda").int().view(rows, -1)
        self.end = torch.full((rows,), keys, dtype=torch.int32, device="cuda")

    def ours(self, backend):
        options = {"end": self.end, "out": {"indices": self.indices}, "exec": topkey.Exec(backend=backend)}
        if self.causal:
            return lambda: topkey.mqa_topk(self.q, self.k, self.weights, self.topk, k_scales=self.scales, **options)
        cache = topkey.KeyCache(self.cache, PAGE, DIM)
        return lambda: topkey.paged_mqa_topk(
            self.q, cache, self.weights, self.topk, block_table=self.table, max_len=self.keys, **options
        )

    def our_logits(self, backend):
        exec = topkey.Exec(backend=backend)
        if self.causal:
            return topkey.mqa_logits(self.q, self.k, self.weights, k_scales=self.scales, end=self.end, exec=exec)
        cache = topkey.KeyCache(self.cache, PAGE, DIM)
        return topkey.paged_mqa_logits(
            self.q, cache, self.weights, block_table=self.table, end=self.end, max_len=self.keys, exec=exec
        )


def deep_gemm_logits(module, p):
    """A call that returns the logits [rows, keys]."""
    if p.causal:
        return lambda: module.fp8_mqa_logits(p.q, (p.k, p.scales), p.weights, p.start, p.end)
    cache = p.cache.view(-1, PAGE, 1, DIM + 4)
    lens = p.end.view(-1, 1)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    plan = module.get_paged_mqa_logits_metadata(lens, PAGE, processors)
    q = p.q.view(p.rows, 1, 64, DIM)
    return lambda: module.fp8_paged_mqa_logits(q, cache, p.weights, lens, p.table, plan, p.keys)


def selection(name, module, p):
    """A call that selects from given logits into p.indices (or memory of its own)."""
    starts = torch.zeros_like(p.end)
    if name == "flashinfer":
        return lambda logits: module.top_k(logits, p.topk)
    if name == "sgl_kernel":
        return lambda logits: module.fast_topk_v2(logits, p.end, p.topk)
    importlib.import_module("vllm._C")
    if p.causal:
        return lambda logits: torch.ops._C.top_k_per_row_prefill(
            logits, starts, p.end, p.indices, p.rows, logits.stride(0), logits.stride(1), p.topk
        )
    return lambda logits: torch.ops._C.top_k_per_row_decode(
        logits, 1, p.end, p.indices, p.rows, logits.stride(0), logits.stride(1), p.topk
    )


def captured(call):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def medians(graphs, rounds):
    """Microseconds of each graph, replayed in turn."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            flush.zero_()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000)
    return {name: statistics.median(all) for name, all in times.items()}


def calls_of(p, peers, backend):
    """Name -> call: ours, and each peer that is here; or the reason why not."""
    calls, reasons = {"topkey": p.ours(backend)}, {}
    logits, source = None, "deep_gemm"
    if peers.get("deep_gemm"):
        try:
            logits = deep_gemm_logits(peers["deep_gemm"], p)
            logits()
        except Exception as error:  # any library may say no in its own way
            reasons["deep_gemm"], logits = f"failed: {error}", None
    if logits is None:
        source, given = "topkey", p.our_logits(backend)
        logits = lambda: given  # noqa: E731
    else:
        calls["deep_gemm (logits only)"] = logits
    for name, module in peers.items():
        if module is None:
            reasons[name] = "absent"
        elif name != "deep_gemm":
            try:
                select = selection(name, module, p)
                select(logits())
                label = f"deep_gemm + {name}" if source == "deep_gemm" else f"{name} (selection only)"
                calls[label] = lambda select=select: select(logits())
            except Exception as error:
                reasons[name] = f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return calls, reasons


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default=",".join(PEERS))
    parser.add_argument("--backend")
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    names = options.against.split(",")
    if unknown := set(names) - set(PEERS):
        print(f"topkey: bench: --against must be of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}", file=sys.stderr)
        sys.exit(2)
    if not torch.cuda.is_available():
        print("topkey: bench: --against needs a GPU, and torch sees none", file=sys.stderr)
        sys.exit(3)
    peers = {}
    for name in names:
        try:
            peers[name] = importlib.import_module(name)
        except Exception as error:  # a package that is there may still fail to load its library
            peers[name] = None
            print(f"{name}: absent ({type(error).__name__}: {error})")
    rows = []
    for rows_, keys, causal in QUICK if options.quick else CASES:
        p = Problem(rows_, keys, causal, options.topk)
        calls, reasons = calls_of(p, peers, options.backend)
        times = medians({name: captured(call) for name, call in calls.items()}, 7 if options.quick else 21)
        ours = times["topkey"]
        print(f"{p.name:24} " + ", ".join(f"{name} {us:.1f} us" for name, us in times.items()))
        for name, us in times.items():
            rows.append({"case": p.name, "rows": rows_, "keys": keys, "topk": p.topk, "graph": True, "peer": name,
                         "peer_us": us, "median_us": ours, "reason": None})  # fmt: skip
        for name, reason in reasons.items():
            print(f"{'':24} {name}: {reason}")
            rows.append({"case": p.name, "peer": name, "peer_us": None, "median_us": ours, "reason": reason})
        del p, calls
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
