# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The operations by name, and questions about a call of them: how much workspace, why it cannot run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _native
from .calls import Answer, Question
from .keys import gather_k, quantize_k, quantize_q, store_k
from .pool import compress_k, expand_pools, pool_k
from .rows import expand_rows, to_slots
from .score import mqa_logits, paged_mqa_logits
from .search import mqa_topk, paged_mqa_topk
from .select import merge_topk, select_blocks, topk
from .types import DEFAULT_EXEC

# In the order of the pipeline.
OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        expand_rows, to_slots, quantize_q, quantize_k, store_k, gather_k, mqa_logits, paged_mqa_logits, topk,
        select_blocks, mqa_topk, paged_mqa_topk, merge_topk, pool_k, compress_k, expand_pools,
    )
}  # fmt: skip


def by_name(op: str) -> Callable[..., Any]:
    if op not in OPERATIONS:
        raise ValueError(f"there is no operation {op!r}; there are {', '.join(OPERATIONS)}")
    return OPERATIONS[op]


def _answer(op: str, ask: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    exec = arguments.pop("exec", DEFAULT_EXEC)
    try:
        by_name(op)(**arguments, exec=Question(ask, exec))
    except Answer as answer:
        return answer.value
    raise AssertionError("an operation must end in calls.finish")


def workspace_bytes(op: str, /, **shapes: Any) -> int:
    """Workspace of a call of `op` with these arguments (its own keywords), in bytes; 0 is possible.

    Arrays need no memory: torch's meta tensors, or any object with `shape` and `dtype`, will do. The size never shrinks
    when rows, keys, topk or max_len grow. Without an array that has memory, exec.backend says the device.

    ValueError: wrong arguments. RuntimeError: no backend can run it.
    """
    return _answer(op, _native.workspace_bytes, shapes)


def unsupported(op: str, /, **shapes: Any) -> str | None:
    """None where a call of `op` with these arguments can run, else the reason. Arrays as in workspace_bytes."""
    return _answer(op, _native.unsupported, shapes)
