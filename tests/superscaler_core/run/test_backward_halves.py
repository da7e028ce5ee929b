"""A split backward gives the results of a whole backward, and computes nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from superscaler_core.run.host import Host
from superscaler_core.run.tape import SegmentFunction, Tape, Tensors

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A segment: a function of inputs and weights, with their shapes."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Shape, ...]
    weights: tuple[Shape, ...]

    def __str__(self) -> str:
        return self.name

    def segment(self) -> SegmentFunction:
        def segment(rng: int, *args: Tensor) -> Tensors:
            torch.manual_seed(rng)
            found = self.function(*args)
            return found if isinstance(found, tuple) else (found,)

        return segment


def attention(x: Tensor, qkv: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """One matrix of projections that is split into three, and a second matrix after it."""
    q, k, v = (
        F.linear(x, w, b).view(2, 3, 2, 4).transpose(1, 2)
        for w, b in zip(qkv.chunk(3), bias.chunk(3), strict=True)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(mixed.transpose(1, 2).flatten(2), out)


def co_shard(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Two parts take passes, each with a slice of either weight."""
    first = F.linear(F.gelu(F.linear(x, up[0:4])), down[:, 0:4])
    return first + F.linear(F.gelu(F.linear(x, up[4:8])), down[:, 4:8])


class Cubed(torch.autograd.Function):
    """``x w^3`` with a custom backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight**3, (grad * x * 3 * weight**2).sum(0)


def shared_bias(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """Two layers in a row add the same bias, so that two paths lead to it."""
    return F.linear(F.linear(x, up, bias).tanh(), down, bias)


def two_layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Two layers with dropout between them."""
    return F.linear(F.dropout(F.linear(x, up)), down)


def looked_up(words: Tensor, places: Tensor) -> Tensor:
    """An embedding with positions: it has only weights and no input."""
    return F.embedding(torch.tensor([[0, 2], [2, 1]]), words) + places


def tied(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One matrix in two layers in a row."""
    return F.linear(F.linear(x, weight).tanh(), weight, bias)


def tied_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One scale and shift in two norms in a row."""
    return F.layer_norm(F.layer_norm(x, (8,), weight, bias).sin(), (8,), weight, bias)


def custom(x: Tensor, first: Tensor, second: Tensor) -> Any:
    """Two custom functions in a row, between ops of torch."""
    return Cubed.apply(Cubed.apply(x, first).sin(), second).cos()  # type: ignore[no-untyped-call]


def two_inputs(x: Tensor, y: Tensor, w: Tensor, v: Tensor) -> Tensors:
    """Each input is multiplied with a weight, and one product with the other input."""
    return F.linear(x, w) * y, F.linear(y, v)


def unbound(x: Tensor, w: Tensor) -> Tensor:
    """Two views of one input, from one node that has two results."""
    return F.linear(x.unbind(1)[1], w) + x.unbind(1)[0]


ROWS, IMAGE = (3, 8), (2, 4, 6, 6)
CASES = [
    Case("linear", F.linear, (ROWS,), ((5, 8), (5,))),
    Case("linear of three dims", F.linear, ((2, 3, 8),), ((5, 8),)),
    Case("conv1d", F.conv1d, ((2, 4, 9),), ((6, 4, 3), (6,))),
    Case("conv2d", F.conv2d, (IMAGE,), ((6, 4, 3, 3), (6,))),
    Case("conv in groups", lambda x, w: F.conv2d(x, w, groups=2), (IMAGE,), ((6, 2, 3, 3),)),
    Case("layer norm", lambda x, w, b: F.layer_norm(x, (8,), w, b), (ROWS,), ((8,), (8,))),
    Case("group norm", lambda x, w, b: F.group_norm(x, 2, w, b), ((2, 4, 5),), ((4,), (4,))),
    Case("rms norm", lambda x, w: F.rms_norm(x, (8,), w), (ROWS,), ((8,),)),
    Case("embedding", looked_up, (), ((4, 8), (2, 8))),
    Case("experts", torch.bmm, ((3, 4, 8),), ((3, 8, 5),)),
    Case("weight on the left", lambda x, w: w @ x, ((8, 3),), ((5, 8),)),
    Case("attention", attention, ((2, 3, 8),), ((24, 8), (24,), (8, 8))),
    Case("scale and shift", lambda x, w, b: x * w + b, ((2, 3, 8),), ((8,), (8,))),
    Case("bias", lambda x, b: x + b, ((2, 3, 8),), ((8,),)),
    Case("dropout", two_layers, (ROWS,), ((6, 8), (5, 6))),
    Case("transposed", lambda x, w: (x @ w.t()).tanh() @ w, (ROWS,), ((5, 8),)),
    Case("slices", co_shard, (ROWS,), ((8, 8), (8, 8))),
    Case("tied", tied, (ROWS,), ((8, 8), (8,))),
    Case("tied norm", tied_norm, (ROWS,), ((8,), (8,))),
    Case("shared bias", shared_bias, (ROWS,), ((8, 8), (8, 8), (8,))),
    Case("of weights", lambda x, w, v: x * (w * w.exp()) + v * w, (ROWS,), ((8,), (8,))),
    Case("two results", lambda x, w: (x * w, x * w.exp() * w), (ROWS,), ((8,),)),
    Case("custom function", custom, (ROWS,), ((8,), (8,))),
    Case("two inputs", two_inputs, (ROWS, (3, 5)), ((5, 8), (6, 5))),
    Case("a result of weights", lambda x, w: (F.linear(x, w), w.sin()), (ROWS,), ((5, 8),)),
    Case("an input as it is", lambda x, w: (x, x * w), (ROWS,), ((8,),)),
    Case("no weights", lambda x, y: (x * y).softmax(-1), (ROWS, ROWS), ()),
    Case("unbound", unbound, ((3, 2, 8),), ((8, 8),)),
]


def filled(shapes: tuple[Shape, ...], dtype: torch.dtype, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


@dataclass
class Ran:
    """The gradients of two microbatches, and the operations of their backward."""

    inputs: list[Tensors]
    weights: list[Tensor | None]
    flops: int
    ops: dict[str, Counter[str]]


class Ops(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run(case: Case, way: str, dtype: torch.dtype, kind: str = "") -> Ran:
    """Two microbatches; weights have no memory while W runs if the way is "dropped"."""
    segment, (recomputed, offloaded) = case.segment(), ("recomputed" in kind, "swapped" in kind)
    names = [segment.__name__]
    tape = Tape(names if recomputed else (), names if offloaded else (), Host())
    weights = tuple(w.requires_grad_() for w in filled(case.weights, dtype, 1))
    ops: dict[str, Counter[str]] = {}
    grads: list[Tensors] = []

    @contextmanager
    def counted(name: str) -> Iterator[None]:
        with Ops() as mode:
            yield
        ops[name] = ops.get(name, Counter()) + mode.found

    results = []
    for mb in range(2):
        results.append(tape.forward(segment, mb, 7, filled(case.inputs, dtype, 2 + mb), weights))
        if offloaded:
            offloaded = tape.offloaded(segment, mb)
            for act in (offloaded.send, offloaded.leave, offloaded.fetch, offloaded.arrive):
                act()
    with FlopCounterMode(display=False) as flops:
        for mb in range(2):
            given = filled(tuple(tuple(x.shape) for x in results[mb]), dtype, 4 + mb)
            if "rerun" in way:
                tape.recompute(segment, mb, 7)
            with counted("I" if "halves" in way or way == "dropped" else "B"):
                if way in ("backward", "rerun"):
                    grads.append(tape.backward(segment, mb, 7, given))
                else:
                    grads.append(tape.backward_inputs(segment, mb, 7, given))
            if way in ("halves", "rerun and halves", "dropped"):
                with counted("W"), gone(weights if way == "dropped" else ()):
                    tape.backward_weights(segment, mb)
        if way == "halves of many":
            with counted("W"):
                tape.backward_weights(segment, 0)
                tape.backward_weights(segment, 1)
    tape.check_done()
    return Ran(grads, [w.grad for w in weights], flops.get_total_flops(), ops)


@contextmanager
def gone(weights: Tensors) -> Iterator[None]:
    """Weights without their memory, as after a window has released them."""
    values = [w.detach().clone() for w in weights]
    for weight in weights:
        weight.untyped_storage().resize_(0)
    try:
        yield
        assert not any(weight.untyped_storage().nbytes() for weight in weights)
    finally:
        for weight, value in zip(weights, values, strict=True):
            weight.untyped_storage().resize_(weight.nbytes)
            weight.data.copy_(value)


def assert_equal(one: Ran, other: Ran) -> None:
    for mine, others in zip(one.inputs, other.inputs, strict=True):
        assert [torch.equal(a, b) for a, b in zip(mine, others, strict=True)] == [True] * len(mine)
    assert len(one.weights) == len(other.weights)
    for a, b in zip(one.weights, other.weights, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


WAYS = [
    ("halves", ""), ("halves of many", ""), ("rerun", "recomputed"),
    ("rerun and halves", "recomputed"), ("halves", "recomputed"), ("halves", "swapped"),
    ("halves", "recomputed and swapped"),
]  # fmt: skip
"""How the backward runs, and what happens to the segment between forward and backward."""


@pytest.mark.parametrize("number, case", [*enumerate(CASES)], ids=str)
def test_split_backward_equals_whole_backward_bit_by_bit(number: int, case: Case) -> None:
    dtype = (torch.float64, torch.float32)[number % 2]
    whole = run(case, "backward", dtype)
    for way, kind in (WAYS[number % 7], WAYS[(number // 7 + 4 * number) % 7]):
        found = run(case, way, dtype, kind)
        assert_equal(found, whole)
        assert kind or found.flops == whole.flops


# --- what each half computes --------------------------------------------------------------------


def block(x: Tensor, up: Tensor, bias: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    hidden = F.linear(F.layer_norm(x, (8,), scale), up, bias)
    return x + F.linear(F.gelu(hidden), down)


BLOCK = Case("block", block, ((3, 8),), ((6, 8), (6,), (8, 6), (8,)))


def test_each_half_runs_only_its_own_matrix_products() -> None:
    """By hand: two layers have a product each for their input, and one for their weight."""
    ran = run(BLOCK, "halves", torch.float64)
    first, second = ran.ops["I"], ran.ops["W"]
    assert (first["mm"], second["mm"]) == (2 * 2, 2 * 2)
    assert (first["gelu_backward"], second["gelu_backward"]) == (2, 0)
    # The gradient of a bias is a sum over rows, which is computed in W.
    assert (first["sum"], second["sum"]) == (0, 2)


def test_weight_half_runs_only_nodes_of_weight_gradients() -> None:
    """Hooks record which nodes run. A product runs once in each half, other nodes in one half."""
    ran: dict[str, list[str]] = {"I": [], "W": []}
    now = "I"

    def note(name: str, *_: Any) -> None:
        ran[now].append(name)

    def segment(rng: int, x: Tensor, up: Tensor, down: Tensor) -> Tensors:
        result = F.linear(F.linear(x.sin(), up).tanh(), down).cos()
        nodes = [result.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is not None:
                node.register_hook(partial(note, node.name()))
                nodes += [after for after, _ in node.next_functions]
        return (result,)

    tape = Tape((), (), Host())
    weights = tuple(w.requires_grad_() for w in filled(((6, 8), (5, 6)), torch.float64, 1))
    (result,) = tape.forward(segment, 0, 0, filled(((3, 8),), torch.float64, 2), weights)
    tape.backward_inputs(segment, 0, 0, (torch.ones_like(result),))
    assert [w.grad for w in weights] == [None, None]
    now = "W"
    tape.backward_weights(segment, 0)
    chain = ["CosBackward0", "MmBackward0", "TanhBackward0", "MmBackward0", "SinBackward0"]
    assert [name for name in ran["I"] if name in chain] == chain
    assert not {"TBackward0", "torch::autograd::AccumulateGrad"}.intersection(ran["I"][:-1])
    of_one = ["MmBackward0", "TBackward0", "torch::autograd::AccumulateGrad"]
    assert ran["W"] == of_one * 2


WITHOUT_VALUES = {
    *("linear", "conv1d", "conv2d", "layer norm", "group norm", "experts", "attention"),
    *("scale and shift", "bias", "slices", "tied", "tied norm", "rms norm"),
}
"""Cases in which the gradient of no weight depends on a weight's value."""


@pytest.mark.parametrize("case", [c for c in CASES if c.name in WITHOUT_VALUES][::2], ids=str)
def test_weight_half_does_not_read_weight_values(case: Case) -> None:
    assert_equal(run(case, "dropped", torch.float64), run(case, "backward", torch.float64))


@pytest.mark.parametrize("case", [c for c in CASES if c.weights][::4], ids=str)
def test_weight_hooks_are_called_once_and_only_in_the_weight_half(case: Case) -> None:
    """These hooks add up gradients in a wider dtype, and count them."""
    tape, segment = Tape((), (), Host()), case.segment()
    weights = tuple(w.requires_grad_() for w in filled(case.weights, torch.float64, 1))
    calls: Counter[int] = Counter()
    for number, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, n=number: calls.update([n]))
    results = tape.forward(segment, 0, 7, filled(case.inputs, torch.float64, 2), weights)
    tape.backward_inputs(segment, 0, 7, tuple(map(torch.ones_like, results)))
    assert not calls
    tape.backward_weights(segment, 0)
    assert calls == dict.fromkeys(range(len(weights)), 1)


def test_weight_half_frees_the_values_that_the_input_half_kept() -> None:
    tape = Tape((), (), Host())
    segment = BLOCK.segment()
    weights = tuple(w.requires_grad_() for w in filled(BLOCK.weights, torch.float64, 1))
    (result,) = tape.forward(segment, 0, 0, filled(BLOCK.inputs, torch.float64, 2), weights)
    tape.backward_inputs(segment, 0, 0, (torch.ones_like(result),))
    with pytest.raises(AssertionError, match="those of weights after it"):
        tape.check_done()
    tape.backward_weights(segment, 0)
    tape.check_done()
    with pytest.raises(KeyError):
        tape.backward_weights(segment, 0)
