"""Autocast: a graph captured under autocast has the casts of torch, and no others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.models import build, example_inputs
from tests.superscaler_core.as_torch import compiled, in_program, on_ranks, train

BF16 = torch.bfloat16
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([0, 5, 2, 3])


class Net(nn.Module):
    """A module with some parameters, whose forward is ``body``."""

    def __init__(self, body: Callable[[Net, Tensor], Tensor], inside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.inside = body, inside
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(8)
        self.table = nn.Embedding(6, 6)
        self.conv = nn.Conv1d(2, 4, 3, bias=False)
        self.register_buffer("factor", torch.full((6,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        is_on = self.inside or torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", BF16, is_on, cache_enabled=False):
            return self.body(self, x)


def off(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return net.down(net.up(x)).square().mean()


def nested(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = net.up(x)
        with torch.autocast("cpu", torch.float16):
            y = net.down(y)
        return net.up(y.float()).square().mean() + (x @ x.T).mean()


def no_grad(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = net.up(x).mean()
    return (net.down(net.up(x)) * scale).float().square().mean()


BODIES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "linear": lambda n, x: n.down(n.up(x)).float().square().mean(),
    "norm": lambda n, x: n.down(n.norm(F.gelu(n.up(x)))).square().mean(),
    "cross entropy": lambda n, x: F.cross_entropy(n.down(n.up(x)), LABELS),
    "mse": lambda n, x: F.mse_loss(n.down(n.up(x)), x.to(BF16)),
    "binary": lambda n, x: F.binary_cross_entropy_with_logits(n.down(n.up(x)), x.sigmoid()),
    "matmul": lambda n, x: (x @ n.up.weight.T @ n.down.weight.T).float().mean(),
    "einsum": lambda n, x: torch.einsum("bi,oi->bo", x, n.up.weight).float().square().mean(),
    "bmm": lambda n, x: torch.bmm(x[None], n.up.weight.T[None]).float().square().mean(),
    "attention": lambda n, x: F.scaled_dot_product_attention(
        n.up(x)[None, None], x.repeat(1, 2)[None, None, :, :8], n.up(x)[None, None]
    ).float().square().mean(),
    "cat": lambda n, x: torch.cat([n.up(x), x], 1).square().mean(),
    "conv": lambda n, x: n.conv(x.reshape(2, 2, 6)).float().square().mean(),
    "softmax": lambda n, x: n.up(x).softmax(-1).square().sum(),
    "embedding": lambda n, x: n.down(n.up(n.table(LABELS))).square().mean(),
    "tied": lambda n, x: F.linear(n.table(LABELS) * x, n.table.weight).float().square().mean(),
    "promoted": lambda n, x: (n.down(n.up(x)) * n.factor + x).square().mean(),
    "double": lambda n, x: (x.double() @ x.double().T + n.up(x).sum()).mean(),
    "in place": lambda n, x: n.down(n.up(x).mul_(2)).float().square().mean(),
    "off": off,
    "nested": nested,
    "no grad": no_grad,
}  # fmt: skip


def trained_alone(model: Net, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cpu", BF16, cache_enabled=False):
        loss = model(x)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def captured(model: Net, x: Tensor) -> ss.Graph:
    if model.inside:
        return ss.capture(model, (x,))
    with torch.autocast("cpu", BF16):
        return ss.capture(model, (x,))


def one_step(trainer: ss.Trainer) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients, as the change of the weights."""
    loss = trainer.step(X)
    before = {name: value.clone() for name, value in trainer.state_dict().items()}
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in trainer.parameters())
    torch.optim.SGD(trainer.parameters(), lr=1.0).step()
    after = trainer.state_dict()
    return loss, {name: before[name] - after[name] for name in after}


@pytest.mark.parametrize(
    "names, inside", [*zip(([*BODIES][i::4] for i in range(4)), cycle([False, True]))]
)
def test_model_captured_under_autocast_trains_as_in_torch(
    names: list[str], inside: bool, tmp_path: Path
) -> None:
    model = Net(lambda net, x: sum(BODIES[name](net, x) for name in names), inside)
    graph = captured(model, X)
    ((loss, grads),) = on_ranks(compiled(graph, "data_parallel", 1), tmp_path, one_step)
    expected, wanted = trained_alone(model, X)
    assert loss.dtype == expected.dtype
    # The same kernels run in the same dtypes. Torch may cast a weight with two readers only once,
    # and add its gradients in bfloat16. Here each reader casts it, and they add in float32.
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-2, atol=1e-5)


def test_autocast_changes_only_the_dtypes_of_a_graph() -> None:
    model = Net(BODIES["norm"])
    plain, cast = ss.capture(model, (X,)), captured(model, X)
    assert str(plain) == str(cast)
    kinds = [op.kind for op in cast.ops if op.outputs[0].dtype == "bfloat16"]
    assert kinds == ["linear", "gelu", "layer_norm", "linear", "square", "mean"]
    assert all(tensor.dtype == "float32" for tensor in cast.parameters.values())


PLANS_OF_GPT = [
    ("zero3", 2, {}), ("hybrid", 4, {"tp": 2, "pp": 2, "microbatches": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("plan_name", "num_devices", "options"), PLANS_OF_GPT)
def test_plans_train_float32_weights_under_bfloat16_autocast(
    plan_name: str, num_devices: int, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = build("gpt")
    with torch.autocast("cpu", BF16):
        graph = ss.capture(model, example_inputs("gpt", 4))
    program = compiled(graph, plan_name, num_devices, **options)
    samples = 4 * program.plan.num_microbatches
    batches = [tuple(example_inputs("gpt", samples, seed=seed)) for seed in range(2)]

    def step(*batch: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            loss: Tensor = model(*batch)
        loss.backward()
        return loss

    found = on_ranks(program, tmp_path, lambda trainer: in_program(trainer, batches))
    expected = train(step, model.parameters(), batches)
    for losses, state in found:
        # bfloat16 has 8 bits, and sums over devices are rounded in another order.
        assert losses == pytest.approx(expected, rel=1e-2)
        assert {value.dtype for value in state.values()} == {torch.float32}


def test_a_step_under_autocast_is_refused(tmp_path: Path) -> None:
    model = Net(BODIES["linear"])
    program = compiled(ss.capture(model, (X,)), "data_parallel", 1)

    def work(trainer: ss.Trainer) -> None:
        with (
            torch.autocast("cpu", BF16),
            pytest.raises(ss.PlanError, match=r"program casts what the capture says"),
        ):
            trainer.step(X)

    on_ranks(program, tmp_path, work)


@ss.register_op("b^ k^ -> b^ k^")
def squared(x: Tensor) -> Tensor:
    """A capture does not see in which dtype this function computes."""
    return x @ x.T @ x


def test_registered_op_under_autocast_raises_capture_error() -> None:
    model = Net(lambda n, x: squared(n.down(n.up(x))).float().mean())
    match = r"squared.* runs under torch.autocast\('cpu'\), whose casts inside of it are not known"
    with torch.autocast("cpu", BF16), pytest.raises(ss.CaptureError, match=match):
        ss.capture(model, (X,))


def test_meta_model_under_autocast_raises_capture_error() -> None:
    with torch.device("meta"):
        model = Net(BODIES["linear"])
    with (
        torch.autocast("cpu", BF16),
        pytest.raises(ss.CaptureError, match="whose tensors are on me"),
    ):
        ss.capture(model, (X,))
