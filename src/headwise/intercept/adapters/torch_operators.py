"""Calls of torch's attention operators, below `scaled_dot_product_attention` (read off torch 2.13).

The operators of the table compute attention over `(batch, heads, length, features)`. Others are named as unreadable.
"""

from typing import Any

import torch

from headwise.attention.masks.factories import causal
from headwise.intercept.adapters.engine import Arguments, UnreadableCall
from headwise.intercept.attention_call import HEADS_FIRST, AttentionCall

NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

_packets = [getattr(torch.ops.aten, name) for name in NAMES if hasattr(torch.ops.aten, name)]
OPERATORS: dict[Any, Any] = {function: packet.default for packet in _packets for function in (packet, packet.default)}
"""The operators as models call them, with or without the name of an overload, and the overload."""


def read(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall:
    """Translate a call of one of torch's attention operators, those in `OPERATORS`, to an `AttentionCall` (headwise's
    form of a call).
    """
    schema = OPERATORS[operator]._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema}
    given = dict(zip(defaults, args, strict=False)) | kwargs
    arguments = Arguments(defaults | given, defaults)
    arguments.ignore("return_debug_mask", "compute_log_sumexp")
    q, k, v = (arguments.take(name) for name in ("query", "key", "value"))
    added, is_causal = (arguments.take("attn_mask", arguments.take("attn_bias")), bool(arguments.take("is_causal")))
    if is_causal and q.shape[2] != k.shape[2]:
        raise UnreadableCall("with is_causal and other numbers of queries than of keys")
    options = {
        "mask": causal() if is_causal else None,
        "scale": arguments.take("scale"),
        "dropout": arguments.take("dropout_p") or 0.0,
    }
    arguments.require_read()
    return AttentionCall(q, k, v, options, HEADS_FIRST, added=added)
