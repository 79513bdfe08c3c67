# SPDX-License-Identifier: Apache-2.0 OR MIT
"""S_ref, the score of docs/numerics.md: doubles, every product and sum rounded apart, in the order of d and h; and the
bound of the arithmetic `f32`."""

import numpy as np

from .numbers import F32


def s_ref(q, k, weights, outer):
    """f32 [R, N] of q [R, H, D], k [N, D], weights [R, H], outer [N], all double. Not canonical yet."""
    with np.errstate(all="ignore"):
        total = np.zeros((q.shape[0], k.shape[0]))
        for h in range(q.shape[1]):
            dot = np.zeros_like(total)
            for d in range(q.shape[2]):
                dot = dot + q[:, h, d, None] * k[:, d]
            positive = np.where(dot <= 0, 0.0, dot)
            total = total + weights[:, h, None] * positive
        return (total * outer).astype(F32)


def bound_f32(q, k, weights, outer):
    """How far the arithmetic `f32` may be from S_ref, [R, N]."""
    heads, dim = q.shape[1:]
    sums = np.einsum("rhd,nd->rhn", np.abs(q), np.abs(k))
    a = np.einsum("rh,rhn->rn", np.abs(weights), sums) * np.abs(outer)
    under = (dim * np.abs(weights).sum(axis=1)[:, None] + heads) * np.abs(outer) + 2
    return (dim + heads + 4) * 2.0**-24 * a + under * 2.0**-150
