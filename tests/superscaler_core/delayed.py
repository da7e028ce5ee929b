"""Reference training with delayed gradients: a plain loop over microbatches in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.published.asynchronous import PipeMare
from superscaler_core.run.evaluate import evaluate
from superscaler_core.schedules import Action, ActionKind, timeline
from tests.superscaler_core.cases import OPTIMIZERS, Case, Trained

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Delays:
    """The weight versions that a plan reads, by closed formulas instead of the plan's schedule.

    Attributes:
        warmup: number of forwards of each stage before its first backward.
        every: microbatches per update.
        rule: "stash" (a backward reads the version of its forward), "vertical" (like "stash", with
            the version of the first stage), or "newest" (a backward reads the newest version).
    """

    warmup: Sequence[int]
    every: int = 1
    rule: str = "stash"

    @classmethod
    def of(cls, case: Case, num_stages: int) -> Delays:
        """The delays of a case's plan."""
        left = [num_stages - 1 - stage for stage in range(num_stages)]
        every = case.options.get("every", 1)
        match case.plan:
            case "pipedream":
                return cls(left, every, "vertical" if case.options.get("vertical") else "stash")
            case "pipedream_2bw":
                return cls(left, case.options.get("every", num_stages), "vertical")
            case "ampnet":
                return cls(left, every, "newest")
        return cls([2 * n + 1 for n in left], every, "newest")

    def forward(self, stage: int, microbatch: int) -> int:
        """The version of a stage's weights that a forward reads."""
        if self.rule == "vertical":
            stage, microbatch = 0, microbatch - microbatch % self.every
        return max(0, microbatch - self.warmup[stage]) // self.every

    def backward(self, stage: int, microbatch: int) -> int:
        """The version of a stage's weights that a backward reads."""
        return (
            microbatch // self.every if self.rule == "newest" else self.forward(stage, microbatch)
        )


Loss = Callable[[Weights, Weights, Sequence[Tensor]], Tensor]
"""The loss of a microbatch, given the weights of its forward and the weights of its backward."""

Corrected = Callable[[int, int, list[Weights]], Weights]
"""Maps (stage, version, all versions so far) to the weights that a backward of the stage reads."""


class _Linear(torch.autograd.Function):
    """A linear map whose backward may read other weights than its forward."""

    @staticmethod
    def forward(ctx, x, forward, backward):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, backward)
        return x @ forward.T

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, backward = ctx.saved_tensors
        return grad @ backward, grad.T @ x, None


def mlp_loss(forward: Weights, backward: Weights, inputs: Sequence[Tensor]) -> Tensor:
    """The loss of ``models.mlp``, with separate weights for forward and backward."""
    x, target = inputs
    num = sum(name.endswith("weight") for name in forward)
    for i in range(num):
        weight = f"layers.{i}.weight"
        x = _Linear.apply(x, forward[weight], backward[weight]) + forward[f"layers.{i}.bias"]
        x = F.gelu(x) if i + 1 < num else x
    return F.mse_loss(x, target)


def graph_loss(graph: ss.Graph) -> Loss:
    """The loss of a captured model; its backward reads the same weights as its forward."""
    return lambda forward, backward, inputs: evaluate(graph, inputs, forward)


@dataclass(frozen=True)
class TiedMLP(Case):
    """A case with an MLP whose last layer shares the weight of the first layer."""

    model: str = "mlp"

    def __str__(self) -> str:
        return f"{super().__str__()}-tied"

    def new_model(self) -> nn.Module:
        model = super().new_model()
        layers: Any = model.layers
        layers[-1].weight = layers[0].weight
        return model

    def _graph(self) -> ss.Graph:
        return ss.capture(self.new_model(), self.inputs(0))


def stages_of_names(plan: ss.Plan) -> dict[str, int]:
    """The stage of every parameter name; for an alias, the last stage that reads the parameter."""
    graph = plan.graph
    stage_of = {op: stage.index for stage in plan.stages for op in stage.ops}
    readers = {tensor.name: graph.readers[tensor] for tensor in graph.parameters.values()}
    own = {name: stage_of[found[0][0]] for name, found in readers.items()}
    return own | {alias: stage_of[readers[name][-1][0]] for alias, name in graph.aliases.items()}


def newest_of(plan: ss.Plan, stage: int) -> dict[Action, int]:
    """The newest version of a stage's weights at every action, if all actions take equal time."""
    assert plan.schedule is not None
    found: dict[Action, int] = {}
    num_made = 0
    spans = timeline(plan.schedule).spans.values()
    for span in sorted(spans, key=lambda s: (s.start, s.action.stage, s.action.microbatch)):
        action = span.action
        num_made += action.kind == "U" and action.stage == stage
        found[action] = num_made
    return found


def train_delayed(
    case: Case,
    plan: ss.Plan,
    loss_of: Loss,
    *,
    start: Mapping[str, Tensor] | None = None,
    corrected: Corrected = lambda stage, version, versions: versions[version],
    rate: Callable[[int, int], float] = lambda stage, update: 1.0,
) -> Trained:
    """Train with exactly the delayed gradients of a case's plan, microbatch by microbatch.

    Args:
        case: a case with an asynchronous plan.
        plan: the plan of the case. Its stages and its number of microbatches are used; its schedule
            is used only for weights that stages share.
        loss_of: the loss.
        start: the initial parameters; if None, the parameters of the case's model.
        corrected: a function that returns the weights that a backward reads.
        rate: a function of (stage, number of the update) that returns the factor of the learning
            rate.
    """
    stage_of, aliases = stages_of_names(plan), plan.graph.aliases
    delays, num_mb = Delays.of(case, plan.num_stages), plan.num_microbatches
    start = start or case.new_model().state_dict()
    live = {name: nn.Parameter(x.clone()) for name, x in start.items() if name not in aliases}
    # If only the newest version is kept, stages that share a weight read different versions.
    borrowed = aliases if delays.rule == "newest" else {}
    parameter_of = {**{name: name for name in live}, **borrowed}
    newest = {name: newest_of(plan, stage_of[parameter_of[name]]) for name in borrowed}

    def version(name: str, kind: str, mb: int) -> int:
        if name in newest:
            return newest[name][Action(ActionKind(kind), stage_of[name], mb)]
        return (delays.forward if kind == "F" else delays.backward)(stage_of[name], mb)

    stages = range(plan.num_stages)
    names = [[name for name in live if stage_of[name] == stage] for stage in stages]
    make = OPTIMIZERS[case.optimizer]
    optimizers = [make([live[name] for name in mine]) for mine in names]
    losses, num_updates = [], 0
    # The versions of all steps; a step reads no version that is older than its start.
    versions: list[Weights] = [{name: x.detach().clone() for name, x in live.items()}]
    for step in range(case.num_steps):
        chunks = [x.chunk(num_mb) for x in case.inputs(step, num_mb)]
        first, total = len(versions) - 1, 0.0
        for mb, inputs in enumerate(zip(*chunks, strict=True)):
            read = {
                name: versions[first + version(name, "F", mb)][mine].clone().requires_grad_()
                for name, mine in parameter_of.items()
            }
            back = {
                name: corrected(stage_of[name], first + version(name, "B", mb), versions)[mine]
                for name, mine in parameter_of.items()
            }
            loss = loss_of(read, back, inputs)
            total += loss.item() / num_mb
            grads = torch.autograd.grad(loss / delays.every, list(read.values()))
            for name, grad in zip(parameter_of.values(), grads, strict=True):
                live[name].grad = grad if live[name].grad is None else live[name].grad + grad
            if (mb + 1) % delays.every == 0:
                for stage, optimizer in enumerate(optimizers):
                    _step(optimizer, rate(stage, num_updates))
                num_updates += 1
                versions.append({name: x.detach().clone() for name, x in live.items()})
        losses.append(total)
    return Trained(tuple(losses), versions[-1] | {a: versions[-1][n] for a, n in aliases.items()})


def delayed(case: Case, plan: ss.Plan) -> Trained:
    """``train_delayed`` with ``mlp_loss`` for the MLP, and with ``graph_loss`` for other models.

    Other models need a plan in which a backward reads the version of its forward.
    """
    return train_delayed(case, plan, mlp_loss if case.model == "mlp" else graph_loss(plan.graph))


def _step(optimizer: torch.optim.Optimizer, factor: float) -> None:
    (group,) = optimizer.param_groups
    rate = group["lr"]
    group["lr"] = rate * factor
    optimizer.step()
    optimizer.zero_grad()
    group["lr"] = rate


def train_asynchronously(
    trainer: ss.Trainer, case: Case, state: Mapping[str, Tensor], pipemare: PipeMare | None = None
) -> Trained:
    """Train one rank's part of an asynchronous program, from the parameters in ``state``."""
    trainer.load_state_dict(state)
    trainer.update_with(OPTIMIZERS[case.optimizer], correction=pipemare)
    losses = []
    for step in range(case.num_steps):
        losses.append(trainer.step(*case.inputs(step, trainer.num_microbatches)).item())
    return Trained(tuple(losses), trainer.state_dict())
