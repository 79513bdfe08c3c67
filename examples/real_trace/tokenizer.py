# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Byte-level BPE from the vocabulary and merge list in a GGUF's metadata.

The metadata names the splitting rule ("smollm"): every digit is a piece of its own, and what lies between digits is
split by the GPT-2 pattern. Python's `re` has no Unicode property classes, so the pattern is written for ASCII and other
text is refused rather than split a little wrongly.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise

# GPT-2's classes on ASCII: contractions; an optional space with letters; with other printable signs; blanks. A run of
# blanks leaves its last one to the word that follows it. Digits never get here.
_PIECE = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
_DIGIT = re.compile(r"([0-9])")


def byte_alphabet() -> list[str]:
    """The character that stands for each byte, [256]: printable Latin-1 for itself, U+0100 on for the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in table]
    table.update({byte: chr(0x100 + i) for i, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]


def split(text: str) -> list[str]:
    """Pieces that merges never cross; joined they are the text again."""
    if not text.isascii():
        raise ValueError("split: text must be ASCII, see the head of this file")
    pieces: list[str] = []
    for part in _DIGIT.split(text):
        pieces += [part] if part.isdigit() else _PIECE.findall(part)
    assert "".join(pieces) == text
    return pieces


class Tokenizer:
    """`encode` gives token ids, `text` the characters of one id. Special tokens are never produced from text."""

    def __init__(self, tokens: list[str], merges: list[str]) -> None:
        self._tokens = tokens
        self._id = {token: i for i, token in enumerate(tokens)}
        self._rank = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._char = byte_alphabet()
        self._byte = {char: byte for byte, char in enumerate(self._char)}
        self._merge = lru_cache(maxsize=None)(self._merge_piece)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without BOS or EOS."""
        return [token for piece in split(text) for token in self._merge(piece)]

    def text(self, token: int) -> str:
        """What one token stands for."""
        return bytes(self._byte[char] for char in self._tokens[token]).decode("utf-8")

    def _merge_piece(self, piece: str) -> tuple[int, ...]:
        """Joins the neighbours of the lowest merge rank, every occurrence from the left, until no pair has a rank."""
        parts = [self._char[byte] for byte in piece.encode("utf-8")]
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self._rank.get(pair, len(self._rank)))
            if best not in self._rank:
                break
            parts = _join(parts, best)
        return tuple(self._id[part] for part in parts)


def _join(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """`parts` with every occurrence of `pair`, from the left, made one."""
    joined: list[str] = []
    i = 0
    while i < len(parts):
        hit = tuple(parts[i : i + 2]) == pair
        joined.append(parts[i] + parts[i + 1] if hit else parts[i])
        i += 2 if hit else 1
    return joined
