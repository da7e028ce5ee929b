"""Small features of models, and whether a capture must accept or refuse them.

A feature is a function from an activation to an activation. A capture must either accept the
feature and give the results of torch, or refuse it with an error that names the feature.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.superscaler_core import functions

WIDTH = 6
DTYPE = torch.float64


@dataclass(frozen=True)
class Feature:
    """The computation of a block after its linear layer.

    Attributes:
        run: computes the result, given the block and the result of its linear layer.
        prepare: changes the block when it is made.
        refused: regular expression for the error message; empty if the feature is captured.
    """

    run: Callable[[Any, Tensor], Tensor] = lambda block, h: torch.tanh(h)
    prepare: Callable[[Any], object] = lambda block: None
    refused: str = ""


class Block(nn.Module):
    """A block: a linear layer, followed by a feature."""

    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.line, self.other = (nn.Linear(WIDTH, WIDTH, dtype=DTYPE) for _ in range(2))
        self.feature = feature
        feature.prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.feature.run(self, self.line(x)) + 0.1 * self.other(x)


class Model(nn.Module):
    """A model with one block per feature, one after another."""

    def __init__(self, features: Sequence[Feature]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, features))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class ByValues(nn.Module):
    """A module with a function that tracing cannot follow, because it depends on tensor values."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.scale = nn.Parameter(torch.arange(WIDTH, dtype=DTYPE) / WIDTH)
        self.register_buffer("kept", torch.zeros(WIDTH, dtype=DTYPE))
        self.count = 1

    def forward(self, h: Tensor) -> Tensor:
        return self.run(self, h)


class Positive(nn.Module):
    """Selects the rows whose sum is positive; their number depends on values."""

    def forward(self, h: Tensor) -> Tensor:
        return h[h.sum(1) > 0]


class Doubled(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda t: 2 * t, lambda t: t)


class Turned(TorchDispatchMode):
    """A dispatch mode that computes cosines instead of sines."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.ops.aten.cos.default if func is torch.ops.aten.sin.default else func
        return func(*args, **(kwargs or {}))


# --- functions of blocks ------------------------------------------------------------------------


def no_grad(function: Callable[..., Tensor], *args: Any) -> Tensor:
    with torch.no_grad():
        return function(*args)


def within(block: Any, enter: Any, function: Callable[[], Tensor]) -> Tensor:
    with enter:
        return function()


def hooked(block: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda grad: 3 * grad)
    return h


def hooked_and_caught(block: Any, h: Tensor) -> Tensor:
    try:
        h.register_hook(lambda grad: 3 * grad)
    except Exception:
        return h
    return h


def kept_grad(block: Any, h: Tensor) -> Tensor:
    h.retain_grad()
    return h * 2


def frozen_for_a_while(block: Any, h: Tensor) -> Tensor:
    block.other.weight.requires_grad_(False)
    made: Tensor = block.other(h)
    block.other.weight.requires_grad_(True)
    return made


def own_gradient(block: Any, h: Tensor) -> Tensor:
    x = h.detach().requires_grad_()
    (grad,) = torch.autograd.grad(block.other(x).tanh().sum(), x, create_graph=True)
    return h * grad


def own_backward(block: Any, h: Tensor) -> Tensor:
    x = h.detach().requires_grad_()
    block.other(x).tanh().sum().backward()
    return h * x.grad if x.grad is not None else h


def counted(block: Any, h: Tensor) -> Tensor:
    block.count += 1
    return h * block.count


def branch(module: Any, h: Tensor) -> Tensor:
    return h * module.scale if h.sum() > 0 else -h


def number(module: Any, h: Tensor) -> Tensor:
    return h * h.sum().item() * module.scale


def hit(module: Any, h: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    for row in (h[:, 0] > 0).nonzero()[:, 0]:
        made[row] = made[row] + h[row].exp() * module.scale
    return made


def masked(module: Any, h: Tensor) -> Tensor:
    return h + (module.scale * h)[h > 0].sum() / 10


def chosen(module: Any, h: Tensor) -> Tensor:
    made: Tensor = module.rows(h)
    return h + made.sum(0) * module.scale


def noisy(module: Any, h: Tensor) -> Tensor:
    return h + torch.rand_like(h) if h.sum() > 0 else h


def counting(module: Any, h: Tensor) -> Tensor:
    module.count += int(h.sum() > 0) + 1
    return h * module.count


def writing(module: Any, h: Tensor) -> Tensor:
    return h * module.kept.add_(1) if h.sum() > 0 else h


def writing_what_it_is_given(module: Any, h: Tensor) -> Tensor:
    return h.mul_(2) if h.sum() > 0 else h.mul_(3)


def by_values(run: Callable[[Any, Tensor], Tensor], refused: str = "") -> Feature:
    """A feature that runs in a ``ByValues`` module of its own."""

    def prepare(block: Any) -> None:
        block.by_values = ByValues(run)
        block.by_values.rows = Positive()

    return Feature(lambda b, h: b.by_values(h * 1), prepare, refused)


def counted_for_people(block: Any, h: Tensor) -> Tensor:
    block.count += 1
    return h


def remembered(block: Any, h: Tensor) -> Tensor:
    before, block.memory = block.memory, h.detach()
    return h if before is None else h + before


def left_for_others(block: Any, h: Tensor) -> Tensor:
    block.memory = h.abs()
    return h + block.memory


def made_once(block: Any, h: Tensor) -> Tensor:
    if block.memory is None:
        block.memory = torch.arange(WIDTH, dtype=DTYPE)
    return h * block.memory


def running_mean(block: Any, h: Tensor) -> Tensor:
    block.kept = 0.9 * block.kept + 0.1 * h.detach().mean(0)
    return h - block.kept


def pieces_in_place(block: Any, h: Tensor) -> Tensor:
    made = torch.zeros(*h.shape[:-1], 2 * WIDTH, dtype=DTYPE)
    made[:, WIDTH:] = h
    made[:, :3] += block.other(h)[:, ::2]
    return made.view(len(h), 2, WIDTH).sum(1)


def buffer(block: Any, value: float = 0.0) -> None:
    block.register_buffer("kept", torch.full((WIDTH,), value, dtype=DTYPE))


def norm(block: Any, **options: Any) -> None:
    block.norm = nn.BatchNorm1d(WIDTH, dtype=DTYPE, **options)
    with torch.no_grad():
        for name, tensor in block.norm.named_buffers():
            if "running" in name:
                tensor.uniform_(0.5, 2.0)


def hidden_parameter(block: Any) -> None:
    block.hidden = [nn.Parameter(torch.ones(WIDTH, dtype=DTYPE) * 2).mul(3)]


def without_elements(block: Any) -> None:
    # As those of nn.Linear(WIDTH, 0), whose initialization warns.
    block.none = nn.Parameter(torch.zeros(0, WIDTH, dtype=DTYPE))
    block.wide = nn.Parameter(torch.zeros(WIDTH, 0, dtype=DTYPE))
    block.unread = nn.Parameter(torch.zeros(0, 3, dtype=DTYPE))


def shared_memory(block: Any) -> None:
    block.other.weight = nn.Parameter(block.line.weight.data)


def tied(block: Any) -> None:
    block.other.weight = block.line.weight


CLOSED_LAYER = nn.Linear(WIDTH, WIDTH, dtype=DTYPE)


def closed_layer(block: Any, h: Tensor) -> Tensor:
    made: Tensor = CLOSED_LAYER(h)
    return made


def seeded(block: Any, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h + torch.randn(h.shape, dtype=DTYPE)


FEATURES: dict[str, Feature] = {
    # autograd Functions, which define their own backward.
    "reversal": Feature(lambda b, h: functions.Reverse.apply(h, 0.5)),
    "straight through": Feature(lambda b, h: functions.Sign.apply(h) * b.other(h)),
    "clamped gradient": Feature(lambda b, h: functions.Clamped.apply(h, 0.001)),
    "halves": Feature(lambda b, h: torch.cat([functions.Halves.apply(h, b.scale)[0]] * 2, 1),
     lambda b: b.register_parameter("scale", nn.Parameter(torch.arange(6.0).double()))),
    "tuple of one": Feature(lambda b, h: functions.One.apply(h)[0]),
    "function without gradient": Feature(lambda b, h: h + no_grad(functions.Sign.apply, h)),
    "function of constants": Feature(
        lambda b, h: h * functions.Sign.apply(torch.arange(6.0).double() - 2)
    ),
    "noisy function": Feature(lambda b, h: functions.Noisy.apply(h), refused="Noisy draws random"),
    "writing function": Feature(
        lambda b, h: functions.Writes.apply(h), refused="Writes modifies an argument in place"
    ),
    "function of a function": Feature(
        lambda b, h: functions.Calls.apply(h, torch.sin), refused="Calls takes a builtin"
    ),
    # Ops without a rule are opaque.
    "inverse": Feature(lambda b, h: h @ torch.linalg.inv(b.square),
     lambda b: setattr(b, "square", nn.Parameter(torch.eye(WIDTH, dtype=DTYPE) * 3))),
    "several results": Feature(lambda b, h: sum(torch.linalg.qr(h[:WIDTH]))[:1] + h),
    "places beside values": Feature(
        lambda b, h: h * torch.mode(h)[0][:, None] + torch.mode(h)[1][:, None]
    ),
    "list of results": Feature(lambda b, h: torch.meshgrid(h[:, 0], h[0], indexing="ij")[1] * h),
    "list of one": Feature(lambda b, h: torch.meshgrid(h[:, 0], indexing="ij")[0][:, None] + h),
    "list of tensors": Feature(lambda b, h: torch.block_diag(h[:4, :3], h[4:, 3:])),
    "index of several": Feature(lambda b, h: h[[1, 0], [2, 5]].sum() * h),
    "index of some dims": Feature(lambda b, h: h[:, None][:, [0, 0, 0], [0, 3, 1]].repeat(1, 2)),
    "op of a library": Feature(lambda b, h: functions.tripled(h, [b.other(h), h], 0.5)),
    "opaque without gradient": Feature(lambda b, h: h * no_grad(torch.linalg.qr, h)[0]),
    "random op without a rule": Feature(
        lambda b, h: torch.native_dropout(h, 0.5, True)[0], refused="it draws random numbers"
    ),
    # Hooks.
    "tensor hook": Feature(hooked, refused="registers a hook on a tensor.*torch.autograd.Function"),
    "caught hook": Feature(hooked_and_caught, refused="registers a hook on a tensor"),
    "retained gradient": Feature(kept_grad),
    "parameter hook": Feature(prepare=lambda b: b.line.weight.register_hook(lambda grad: 2 * grad),
     refused=r"'blocks.\d.line.weight' has a hook on its gradient.*Trainer.parameters"),
    "post-accumulate hook": Feature(
        prepare=lambda b: b.other.bias.register_post_accumulate_grad_hook(lambda p: None),
        refused=r"'blocks.\d.other.bias' has a hook",
    ),
    "backward hook": Feature(prepare=lambda b: b.other.register_full_backward_hook(lambda *_: None),
     refused=r"module 'blocks.\d.other' \(Linear\) has a backward hook .*handle.remove"),
    "backward pre-hook": Feature(
        prepare=lambda b: b.register_full_backward_pre_hook(lambda *_: None),
        refused=r"module 'blocks.\d' \(Block\) has a backward pre-hook",
    ),
    "forward hook": Feature(prepare=lambda b: b.line.register_forward_hook(lambda m, i, o: 2 * o)),
    "forward pre-hook": Feature(
        prepare=lambda b: b.line.register_forward_pre_hook(lambda m, i: (2 * i[0],))
    ),
    "hook of a node": Feature(
        lambda b, h: h if h.grad_fn is None else h * 2, refused="node of autograd.*Function"
    ),
    "hook in a forward hook": Feature(
        prepare=lambda b: b.line.register_forward_hook(lambda m, i, o: hooked(m, o)),
        refused=r"module 'blocks.\d.line' \(Linear\): it registers a hook on a tensor",
    ),
    # Checkpointing, and hooks on the tensors that autograd saves.
    "reentrant checkpoint": Feature(lambda b, h: checkpoint(b.other, h, use_reentrant=True)),
    "reentrant checkpoint of no gradient": Feature(
        lambda b, h: h + checkpoint(b.other, h.detach(), use_reentrant=True),
        refused="given no tensor that needs a gradient.*use_reentrant=False",
    ),
    "checkpoint": Feature(lambda b, h: checkpoint(b.other, h, use_reentrant=False)),
    "saved on the host": Feature(
        lambda b, h: within(b, torch.autograd.graph.save_on_cpu(), lambda: h.tanh())
    ),
    "saved-tensor hooks": Feature(
        lambda b, h: within(
            b, torch.autograd.graph.saved_tensors_hooks(lambda t: 2 * t, lambda t: t), h.tanh
        ),
        refused="saved_tensors_hooks",
    ),
    "own saved-tensor hooks": Feature(
        lambda b, h: within(b, Doubled(), h.tanh), refused="saved_tensors_hooks"
    ),
    "dispatch mode": Feature(
        lambda b, h: within(b, Turned(), h.sin), refused="TorchDispatchMode, which is not traced"
    ),
    # Weights that are computed, shared or frozen.
    "weight norm": Feature(prepare=lambda b: parametrizations.weight_norm(b.line)),
    "weight norm by a hook": Feature(prepare=lambda b: weight_norm(b.line)),
    "weight norm of all": Feature(prepare=lambda b: parametrizations.weight_norm(b.line, dim=None)),
    "parametrization": Feature(
        prepare=lambda b: parametrize.register_parametrization(b.line, "weight", Symmetric())
    ),
    "spectral norm": Feature(prepare=lambda b: spectral_norm(b.line)),
    "frozen": Feature(prepare=lambda b: b.other.requires_grad_(False)),
    "tied": Feature(prepare=tied),
    "attribute of shared memory": Feature(lambda b, h: h @ b.turned,
     lambda b: setattr(b, "turned", b.line.weight.detach().t()), "share memory but are two ten"),
    "shared memory": Feature(prepare=shared_memory, refused="share memory but are two tensors"),
    "frozen for a while": Feature(frozen_for_a_while),
    "hidden parameter": Feature(
        lambda b, h: h * b.hidden[0], hidden_parameter, "needs a gradient but is no parameter"
    ),
    "layers in a list": Feature(lambda b, h: b.layers[0](h),
     lambda b: setattr(b, "layers", [nn.Linear(WIDTH, WIDTH, dtype=DTYPE)]),
     r"reads a tensor \[6, 6\] that needs a gradient but is no parameter.* nn.ModuleList"),
    "layer in a closure": Feature(
        closed_layer, refused="that needs a gradient but .* closure into nn.ModuleList"
    ),
    "written parameter": Feature(lambda b, h: h * no_grad(b.other.weight.mul_, 0.9)[0],
     refused=r"writes parameter 'blocks.\d.other.weight' in place"),
    "no elements": Feature(
        lambda b, h: torch.cat([h, F.linear(h, b.none)], 1) + F.linear(F.linear(h, b.none), b.wide),
        without_elements,
    ),
    "sparse gradient": Feature(lambda b, h: h + b.rows(torch.arange(len(h))),
     lambda b: setattr(b, "rows", nn.Embedding(9, WIDTH, sparse=True, dtype=DTYPE)),
     r"gradient of 'blocks.\d.rows.weight' would be sparse.*sparse=False"),
    "sparse buffer": Feature(lambda b, h: torch.sparse.mm(b.eye, h),
     lambda b: b.register_buffer("eye", torch.eye(8, dtype=DTYPE).to_sparse()),
     r"buffer 'blocks.\d.eye' is sparse_coo.*to_dense"),
    "sparse parameter": Feature(lambda b, h: torch.sparse.mm(b.eye, h),
     lambda b: setattr(b, "eye", nn.Parameter(torch.eye(8, dtype=DTYPE).to_sparse())),
     r"parameter 'blocks.\d.eye' is sparse_coo"),
    "sparse attribute": Feature(lambda b, h: torch.sparse.mm(b.eye, h),
     lambda b: setattr(b, "eye", torch.eye(8, dtype=DTYPE).to_sparse()),
     r"tensor 'blocks.\d.eye' is sparse_coo"),
    "sparse tensor of the forward": Feature(
        lambda b, h: torch.sparse.mm((h @ h.T).detach().to_sparse(), h),
        refused="aten.to_sparse.* makes a sparse or nested tensor.*register_op",
    ),
    # Parts without gradient.
    "no_grad": Feature(lambda b, h: h * no_grad(b.other, h)),
    "no_grad that changes nothing": Feature(lambda b, h: h * no_grad(torch.clone, h)),
    "view in no_grad": Feature(lambda b, h: h * no_grad(h.view, h.shape)),
    "passed on in no_grad": Feature(lambda b, h: h * no_grad(h.contiguous)),
    "written in no_grad": Feature(
        lambda b, h: no_grad(h.clamp_, -0.1, 0.1), refused="without gradient, what has one"
    ),
    "enable_grad in no_grad": Feature(lambda b, h: h * no_grad(torch.enable_grad()(b.other), h)),
    "rounded by detach": Feature(lambda b, h: h + (h.round() - h).detach()),
    "inference mode": Feature(
        lambda b, h: h + within(b, torch.inference_mode(), lambda: b.other(h)),
        refused="torch.inference_mode.*torch.no_grad",
    ),
    "data": Feature(lambda b, h: h * h.data),
    "own gradient": Feature(own_gradient, refused="torch.autograd.grad.*register_op"),
    "own backward": Feature(own_backward, refused="runs a backward.*register_op"),
    # Modes, buffers, attributes.
    "dropout in eval": Feature(lambda b, h: F.dropout(h, 0.5, training=False)),
    "dropout of nothing in place": Feature(lambda b, h: F.dropout(h, 0.0, inplace=True) * 2),
    "norm in eval": Feature(lambda b, h: b.norm(h), lambda b: (norm(b), b.norm.eval())),
    "norm of the batch": Feature(lambda b, h: b.norm(h[None].transpose(1, 2)).transpose(1, 2)[0],
     lambda b: setattr(b, "norm", nn.InstanceNorm1d(WIDTH, dtype=DTYPE))),
    "running norm of instances": Feature(
        lambda b, h: b.norm(h[None].transpose(1, 2)).transpose(1, 2)[0],
        lambda b: setattr(
            b, "norm", nn.InstanceNorm1d(WIDTH, dtype=DTYPE, track_running_stats=True)
        ),
    ),
    "norm of all batches so far": Feature(lambda b, h: b.norm(h),
     lambda b: setattr(b, "norm", nn.BatchNorm1d(WIDTH, dtype=DTYPE, momentum=None)),
     r"module 'blocks.\d.norm' \(BatchNorm1d\) has momentum=None.*give it a number"),
    "norm in training": Feature(lambda b, h: b.norm(h),
     lambda b: (norm(b), setattr(b, "norm", nn.SyncBatchNorm.convert_sync_batchnorm(b.norm)))),
    "buffer": Feature(lambda b, h: h * (b.kept + 1), lambda b: buffer(b, 2.0)),
    "counting buffer": Feature(lambda b, h: h * b.kept.add_(1), buffer),
    "running mean": Feature(running_mean, buffer, r"in the place of 'blocks.\d.kept'"),
    "counter": Feature(counted, lambda b: setattr(b, "count", 1), r"the next in blocks.\d.count"),
    "counter for people": Feature(counted_for_people, lambda b: setattr(b, "count", 1)),
    "memory": Feature(remembered, lambda b: setattr(b, "memory", None), r"in blocks.\d.memory"),
    "left for others": Feature(left_for_others, lambda b: setattr(b, "memory", None)),
    "made once": Feature(made_once, lambda b: setattr(b, "memory", None)),
    "written attribute": Feature(lambda b, h: h * b.t.add_(1),
     lambda b: setattr(b, "t", torch.ones(6).double()), r"changes tensor 'blocks.\d.t'"),
    # Random numbers, values, dtypes, aliases.
    "random numbers": Feature(lambda b, h: h[torch.randperm(len(h), generator=torch.Generator())],
     refused="randperm.* a torch.Generator of its own"),
    "seeded random numbers": Feature(seeded, refused="seeds torch's random numbers.*a buffer"),
    "random numbers of Python": Feature(
        lambda b, h: h * random.random(), refused="random numbers of Python or numpy"
    ),
    "branch on values": by_values(branch),
    "number of a tensor": by_values(number),
    "loop over what is hit": by_values(hit),
    "mask of values": by_values(masked),
    "rows by values": by_values(chosen),
    "random numbers by values": by_values(noisy, "draws random numbers"),
    "counter by values": by_values(counting, "ByValues keeps something .* count"),
    "buffer written by values": by_values(writing, "ByValues|written"),
    "argument written by values": by_values(writing_what_it_is_given, "changes what it is given"),
    "complex": Feature(lambda b, h: (h * torch.tensor(1 + 2j)).abs()),
    "autocast": Feature(
        lambda b, h: within(b, torch.autocast("cpu", torch.bfloat16), lambda: b.other(h))
    ),
    "no_grad under autocast": Feature(
        lambda b, h: within(
            b, torch.autocast("cpu", torch.bfloat16), lambda: b.other(h) * no_grad(b.other, h)
        )
    ),
    "autocast that is off": Feature(
        lambda b, h: within(b, torch.autocast("cpu", enabled=False), lambda: b.other(h))
    ),
    "cast": Feature(lambda b, h: h + (h * 4).to(torch.int32).to(h.dtype) + h.float().double()),
    "in place": Feature(lambda b, h: h.mul_(2).relu_()),
    "diagonal in place": Feature(lambda b, h: (h * 1).fill_diagonal_(3.0, wrap=True)),
    "diagonal of a cube": Feature(
        lambda b, h: h + (h[:6, :, None] * h[0]).fill_diagonal_(3.0).sum((1, 2))[0]
    ),
    "list in place": Feature(lambda b, h: (torch._foreach_mul_([h := h * 1], 2.0), h)[1]),
    "view in place": Feature(lambda b, h: h.view(-1).mul_(2).view(h.shape)),
    "pieces in place": Feature(pieces_in_place),
    "view in place without gradient": Feature(
        lambda b, h: h + no_grad(h[:, 0].mul_, 2)[:, None], refused="without gradient, what has one"
    ),
}  # fmt: skip
