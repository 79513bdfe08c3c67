# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A llama-architecture GGUF model in float32 numpy: just enough to run a text once and look at its attention.

Weights are de-quantised when a layer is reached, so one layer at a time is in memory. Names of tensors and metadata are
the GGUF convention's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
# Called for each layer with (layer, q [T, heads, D], k [T, kv_heads, D]), both after rope.
Observer = Callable[[int, F32, F32], None]

_QUERY_BLOCK = 256  # query rows per attention block: [3 * 256, 8192] f32 scores are 25 MB, which still suits a large L3


@dataclass(frozen=True)
class Config:
    """The shape of the model, all from the GGUF's metadata."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_base: float
    norm_eps: float
    context: int


class Model:
    """One GGUF file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self.meta("general.architecture") != "llama":
            raise ValueError("Model: architecture must be llama")
        self.config = Config(
            layers=self.meta("llama.block_count"),
            heads=self.meta("llama.attention.head_count"),
            kv_heads=self.meta("llama.attention.head_count_kv"),
            head_dim=self.meta("llama.rope.dimension_count"),
            rope_base=self.meta("llama.rope.freq_base"),
            norm_eps=self.meta("llama.attention.layer_norm_rms_epsilon"),
            context=self.meta("llama.context_length"),
        )

    def meta(self, key: str):
        """A metadata value."""
        return self._fields[key].contents()

    def weight(self, name: str) -> F32:
        """A tensor as f32; matrices are [out, in]."""
        tensor = self._tensors[name + ".weight"]
        return np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def run(self, tokens: list[int], observe: Observer) -> float:
        """Runs the tokens at positions 0.., calls `observe` at each layer, returns the perplexity of tokens 1.. ."""
        embedding = self.weight("token_embd")
        turn = rope_table(len(tokens), self.config)
        x = embedding[tokens]
        for layer in range(self.config.layers):
            x = x + self._attention(layer, x, turn, observe)
            x = x + self._mlp(layer, x)
        x = rms_norm(x, self.weight("output_norm"), self.config.norm_eps)
        return perplexity(x, embedding, tokens)  # the output matrix is the embedding: the file has no other

    def _attention(self, layer: int, x: F32, turn: tuple[F32, F32], observe: Observer) -> F32:
        """The attention half of a layer without its residual, [T, hidden]."""
        c, name = self.config, f"blk.{layer}."
        h = rms_norm(x, self.weight(name + "attn_norm"), c.norm_eps)
        q = (h @ self.weight(name + "attn_q").T).reshape(-1, c.heads, c.head_dim)
        k = (h @ self.weight(name + "attn_k").T).reshape(-1, c.kv_heads, c.head_dim)
        v = (h @ self.weight(name + "attn_v").T).reshape(-1, c.kv_heads, c.head_dim)
        q, k = rope(q, turn), rope(k, turn)
        observe(layer, q, k)
        share = c.heads // c.kv_heads  # query heads g*share .. use key head g
        out = np.empty_like(q)
        for g in range(c.kv_heads):
            group = slice(g * share, (g + 1) * share)
            out[:, group] = causal_attention(q[:, group], k[:, g], v[:, g])
        return out.reshape(len(x), -1) @ self.weight(name + "attn_output").T

    def _mlp(self, layer: int, x: F32) -> F32:
        """The gated MLP of a layer without its residual, [T, hidden]."""
        name = f"blk.{layer}."
        h = rms_norm(x, self.weight(name + "ffn_norm"), self.config.norm_eps)
        gate: F32 = h @ self.weight(name + "ffn_gate").T
        gate /= 1 + np.exp(-gate)  # SiLU
        gate *= h @ self.weight(name + "ffn_up").T
        return gate @ self.weight(name + "ffn_down").T


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    norm: F32 = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x / norm * weight


def rope_table(tokens: int, config: Config) -> tuple[F32, F32]:
    """cos and sin [T, 1, D/2] of position * base^(-2i/D), from doubles: f32 angles near 8191 are 2e-4 off."""
    half = config.head_dim // 2
    frequency = config.rope_base ** (-np.arange(half) / half)
    angle = np.arange(tokens)[:, None, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rope(x: F32, turn: tuple[F32, F32]) -> F32:
    """Rotates the pairs (2i, 2i+1) of [T, heads, D].

    The interleaved form, because a llama-architecture GGUF stores the rows of attn_q and attn_k in the order that makes
    it equal the half-split form of the original checkpoint. q and k share the order, so dot products are those of the
    checkpoint. (Half-split rope on these rows gives a perplexity of several hundred.)
    """
    cos, sin = turn
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def causal_attention(q: F32, k: F32, v: F32) -> F32:
    """Softmax attention of a group: q [T, H, D] on one key head k, v [T, D]; result [T, H, D]."""
    tokens, heads, dim = q.shape
    out = np.empty_like(q)
    for begin in range(0, tokens, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, tokens)
        rows = q[begin:end].reshape(-1, dim) * np.float32(dim**-0.5)
        scores = (rows @ k[:end].T).reshape(end - begin, heads, end)
        hidden = np.arange(end) > np.arange(begin, end)[:, None]
        np.copyto(scores, -np.inf, where=hidden[:, None])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out[begin:end] = (scores.reshape(-1, end) @ v[:end]).reshape(end - begin, heads, dim)
    return out


def perplexity(x: F32, output: F32, tokens: list[int]) -> float:
    """exp of the mean negative log probability of each next token.

    x [T, hidden] is what the last norm gives, output is [vocab, hidden].
    """
    target = np.array(tokens[1:])
    loss = np.empty(len(target))
    for begin in range(0, len(target), _QUERY_BLOCK):
        logits = x[:-1][begin : begin + _QUERY_BLOCK] @ output.T
        top = logits.max(axis=-1)
        log_sum = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1, dtype=np.float64))
        rows = slice(begin, begin + len(logits))
        loss[rows] = log_sum - logits[np.arange(len(logits)), target[rows]]
    return float(np.exp(loss.mean()))
