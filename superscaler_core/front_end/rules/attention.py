"""Attention: batch, heads and queries are cut freely, keys never."""

from __future__ import annotations

from superscaler_core.front_end.call import Call, broadcast_to, text
from superscaler_core.front_end.rules.table import rule
from superscaler_core.graph.tensor import PTensor


@rule("aten.scaled_dot_product_attention")
def attention(call: Call) -> PTensor:
    q, k, v, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    batch = ["b", "h", "s", "f", "i"][: len(q.shape) - 2]
    if any(t.shape[:-3] != q.shape[:-3] for t in (k, v)):
        raise call.error("batch dims that broadcast are not supported; expand them first.")
    q_batch, kv_batch = list(batch), list(batch)
    if call["enable_gqa"]:
        # Query head (g r) reads key head g: cut by groups, each part has its own.
        q_batch[-1], kv_batch[-1] = "(g r)", "g"
    inputs = [q, k, v]
    operands = [text([*q_batch, "l", "e^"]), text([*kv_batch, "t^", "e^"]),
                text([*kv_batch, "t^", "d"])]  # fmt: skip
    if mask is not None:
        inputs.append(mask)
        scores = [*q_batch, "l", "t^"]
        operands.append(broadcast_to(mask.shape, scores, (*q.shape[:-1], k.shape[-2])))
    annotation = f"{', '.join(operands)} -> {text([*q_batch, 'l', 'd'])}"
    # Two products over keys: 2 (e + d) operations where the loops e and d make e * d iterations.
    width, value_width = q.shape[-1], v.shape[-1]
    flops = 2.0 * (1 / width + 1 / value_width) / (2 if call["is_causal"] else 1)
    return call.op(
        "attention", annotation, inputs, _code(call, inputs), flops=flops,
        saves=(*range(len(inputs)), len(inputs)),
    )  # fmt: skip


def _code(call: Call, inputs: list[PTensor]) -> str:
    q, k = inputs[:2]
    words = [f"{{x{i}}}" for i in range(len(inputs))]
    given = {
        name: call[name] for name in ("scale", "enable_gqa") if call[name] not in (None, False)
    }
    if not call["is_causal"] and call["dropout_p"] == 0:
        words += [f"{name}={value}" for name, value in given.items()]
        return f"F.scaled_dot_product_attention({', '.join(words)})"
    if call["is_causal"]:
        words += ["first={start[l]}", "is_causal=True"]
    words += [f"{name}={value}" for name, value in given.items()]
    if call["dropout_p"] > 0:
        shape = (*q.shape[:-1], k.shape[-2])
        words += [f"p={call['dropout_p']}", "seed={seed}",
                  "lo=(*{in0.lo}[:-1], 0)", f"shape={shape}"]  # fmt: skip
    return f"ops.attention({', '.join(words)})"
