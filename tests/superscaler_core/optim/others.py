"""Optimizers as users write them, which need whole matrices or all parameters together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OneByOne(torch.optim.Optimizer):
    """An optimizer that updates each parameter by itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group["lr"])

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class Shampoo(OneByOne):
    """Preconditions each dim by the inverse root of its second moments (Gupta et al., 2018)."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        for dim in range(grad.dim()):
            turned = grad.movedim(dim, 0)
            rows = turned.reshape(len(turned), -1)
            held = state.setdefault(f"second_{dim}", 0.1 * torch.eye(len(rows)).to(p))
            held += rows @ rows.T
            values, vectors = torch.linalg.eigh(held)
            root = (vectors * values ** (-0.5 / grad.dim())) @ vectors.T
            grad = (root @ rows).reshape(turned.shape).movedim(0, dim)
        p -= lr * grad


class LAMB(OneByOne):
    """Adam whose update is as long as the parameter (You et al., 2019)."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        first = state.setdefault("first", torch.zeros_like(p))
        second = state.setdefault("second", torch.zeros_like(p))
        first.lerp_(grad, 0.1)
        second.lerp_(grad.square(), 0.01)
        update = first / (second.sqrt() + 1e-6)
        p -= lr * (p.norm() / update.norm() if p.norm() > 0 else 1.0) * update


class LARS(torch.optim.SGD):
    """SGD whose steps are as long as the parameter (You et al., 2017)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.norm() > 0:
                    p.grad.mul_(p.norm() / (p.grad.norm() + 1e-9))
        super().step()


class SAM(torch.optim.Optimizer):
    """Steps by the gradient at the worst point nearby (Foret et al., 2020)."""

    def __init__(self, params: Any, base: Any = torch.optim.SGD, rho: float = 0.05, **options: Any):
        super().__init__(params, {"rho": rho, "adaptive": False, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Tensor:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        before = [p.clone() for p in held]
        for p in held:
            p += self.param_groups[0]["rho"] * p.grad / norm
        for p in held:
            p.grad = None
        loss = torch.enable_grad()(closure)()
        for p, value in zip(held, before, strict=True):
            p.copy_(value)
        self.base.step()
        return loss


class SOAP(OneByOne):
    """Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al., 2024), for matrices."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        grad = grad.reshape(len(p), -1)
        first = torch.diag(torch.arange(1.0, 1.0 + len(grad))).to(p)
        left = state.setdefault("left", first)
        second = state.setdefault("second", torch.zeros_like(grad))
        # Slowly: where two of its eigenvalues are near, rounding decides the basis.
        left.lerp_(grad @ grad.T, 0.1)
        _, basis = torch.linalg.eigh(left)
        turned = basis.T @ grad
        second.lerp_(turned.square(), 0.1)
        p -= lr * (basis @ (turned / (second.sqrt() + 1e-4))).view_as(p)
