# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Golden bytes of tiled pages: rows as a dense matrix, and the page that holds them, by reshaping and transposing.

    python make_pages.py           writes tiled_pages.json beside this file
    python make_pages.py --check   recomputes it and fails if the stored bytes differ

The file is a list of {format, layout, page_size, head_dim, values [page_size] (hex, one row each), scales [page_size]
(hex), page (hex)}. Row t of the page is row t of the matrix. Codes and scales are random bytes: only their place counts.

A tiled page (docs/formats.md) is all values, then all scales. Rows fall into groups of N. A group's values are
[piece][row][16 bytes]; the four scales of an mxfp4 row, index s = hi * (64/N) + lo, are [lo][row][hi] in its group; f32
scales lie row by row.
"""

import json
import sys
from pathlib import Path

import numpy as np

from rules import Random

RNG = Random(20250611)
PAGES = (
    ("fp8", 16, 32, 128),
    ("fp8", 16, 48, 32),
    ("fp8_fnuz", 16, 32, 64),
    ("mxfp4", 16, 32, 128),
    ("mxfp4", 32, 64, 128),
    ("mxfp4", 64, 64, 128),
)


def random_bytes(rows, width):
    return np.array([RNG.index(256) for _ in range(rows * width)], np.uint8).reshape(rows, width)


def tiled(values, scales, n, fp4):
    rows, width = values.shape
    body = values.reshape(rows // n, n, width // 16, 16).transpose(0, 2, 1, 3)
    if fp4:
        scales = scales.reshape(rows // n, n, n // 16, 64 // n).transpose(0, 3, 1, 2)
    return np.concatenate([body.ravel(), scales.ravel()])


def self_check():
    """Single bytes against the published offsets."""
    values, scales = random_bytes(64, 128), random_bytes(64, 4)
    page = tiled(values, scales, 16, False)
    for t, d in ((0, 0), (5, 7), (15, 127), (16, 0), (33, 100), (63, 127)):
        assert page[t // 16 * 16 * 128 + d // 16 * 256 + t % 16 * 16 + d % 16] == values[t, d]
        assert page[64 * 128 + 4 * t + d % 4] == scales[t, d % 4]
    values = values[:, :64]
    for n in (16, 32, 64):
        page, low, high = tiled(values, scales, n, True), 64 // n, 4 // (64 // n)
        for t in range(64):
            g, lane = t // n, t % n
            for j in range(64):
                assert page[g * 64 * n + j // 16 * 16 * n + lane * 16 + j % 16] == values[t, j]
            for s in range(4):
                assert page[64 * 64 + g * 4 * n + s % low * n * high + lane * high + s // low] == scales[t, s]


def document():
    self_check()
    pages = []
    for name, n, page_size, head_dim in PAGES:
        fp4 = name == "mxfp4"
        values = random_bytes(page_size, head_dim // 2 if fp4 else head_dim)
        scales = random_bytes(page_size, 4)
        page = {"format": name, "layout": f"tiled{n}", "page_size": page_size, "head_dim": head_dim}
        page |= {"values": [v.tobytes().hex() for v in values], "scales": [s.tobytes().hex() for s in scales]}
        pages.append(page | {"page": tiled(values, scales, n, fp4).tobytes().hex()})
    return "[\n" + ",\n".join(json.dumps(page) for page in pages) + "\n]\n"


def main():
    path, text = Path(__file__).with_name("tiled_pages.json"), document()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if path.exists() and path.read_text() == text else f"{path.name} is not what this script makes")
    path.write_text(text)
    print(f"{path.name}: {len(PAGES)} pages, {len(text)} bytes")


if __name__ == "__main__":
    main()
