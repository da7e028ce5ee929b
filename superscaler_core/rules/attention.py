"""Attention: batch, heads and queries can be cut; keys stay whole."""

from __future__ import annotations

from math import prod

from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import RuleCall, broadcast_to, fields, text
from superscaler_core.rules.table import rule


@rule("aten.scaled_dot_product_attention")
def attention(call: RuleCall) -> PTensor:
    q, k, v, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    lead, queries, keys = call.shape[:-2], q.shape[-2], k.shape[-2]
    batch = ["b", "h", "s", "f", *(f"d{i}" for i in range(4, len(lead)))][: len(lead)]
    kv_batch, kv_lead = list(batch), lead
    if call["enable_gqa"]:
        # Query head (g r) reads key head g. If heads are cut by groups, each part has its own keys.
        batch[-1], kv_batch[-1] = "(g r)", "g"
        kv_lead = (*lead[:-1], k.shape[-3])
    inputs = [q, k, v]
    operands = [
        broadcast_to(q.shape, [*batch, "l", "e^"], (*lead, *q.shape[-2:])),
        broadcast_to(k.shape, [*kv_batch, "t^", "e^"], (*kv_lead, *k.shape[-2:])),
        broadcast_to(v.shape, [*kv_batch, "t^", "d"], (*kv_lead, *v.shape[-2:])),
    ]
    if mask is not None:
        inputs.append(mask)
        operands.append(broadcast_to(mask.shape, [*batch, "l", "t^"], (*lead, queries, keys)))
    annotation = f"{', '.join(operands)} -> {text([*batch, 'l', 'd'])}"
    # Two products, of queries with keys and of scores with values.
    flops = 2 * prod(call.shape[:-1]) * keys * (q.shape[-1] + v.shape[-1])
    flops //= 2 if call["is_causal"] else 1
    return call.op(
        "attention", annotation, inputs, _code(call, inputs), flops=flops,
        saves=(*range(len(inputs)), len(inputs)),
    )  # fmt: skip


def _code(call: RuleCall, inputs: list[PTensor]) -> str:
    is_plain = not call["is_causal"] and call["dropout_p"] == 0
    words = [fields(len(inputs))]
    words += ["first={start[l]}", "is_causal=True"] if call["is_causal"] else []
    usual = {"scale": None, "enable_gqa": False}
    words += [f"{name}={call[name]}" for name, value in usual.items() if call[name] is not value]
    if call["dropout_p"] > 0:
        shape = (*call.shape[:-1], inputs[1].shape[-2])
        words += [f"p={call['dropout_p']}", "seed={seed}",
                  "lo=(*{out0.lo}[:-1], 0)", f"shape={shape}"]  # fmt: skip
    function = "F.scaled_dot_product_attention" if is_plain else "ops.attention"
    return f"{function}({', '.join(words)})"
