"""Policy: a network that learns to place groups from the simulated times of its own placements.

Objective: the least expected R = sqrt(time) of the placements that the network draws, by REINFORCE.
An update draws K placements and descends

    mean of (R - b) log p(placement)

where the baseline b is a moving average of R. Times are in units of the work on the fastest device;
an impossible placement counts as 100.

``Placer`` is ColocRL's: an LSTM reads the groups in order, and a second one chooses a device for
each, with attention over all groups and with the device before as input. With ``num_groups``, a
``Grouper`` comes first, as in the hierarchical model: it draws a new group for every group of the
problem, and the placer places the new groups; log p is the sum of both. This is a heuristic without
a bound on its gap. Of the placement planners, only this module imports torch.

Complexity: updates times K simulations, and as many steps of the networks as there are groups.

Differences from the published: simulated times, not measured ones; the placer's second LSTM also
reads the encoding of the group that it places; networks are small; features are times, bytes and
traffic (there, types and shapes of operations); the learning rate is lower than the 0.1 of the
hierarchical code, which decays it by 0.95; scores are bounded; the best placement drawn is the
answer.

Sources: Mirhoseini et al., ICML 2017; Mirhoseini et al., ICLR 2018, and its published controller:
baseline decay 0.9, failure counted as 100, gradients of norm at most 1, min(256, 20 devices)
groups, failures ignored after 1000 updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from superscaler_core.published.placement.problem import PlacementProblem
from superscaler_core.space import Array, Solution

FAILED = 100.0
"""The time that an impossible placement counts as, in units of the work on the fastest device."""

BASELINE_DECAY = 0.9
MOST_NORM = 1.0
"""The largest norm of the gradients."""

MOST_LOGIT = 2.0
"""Bound on the scores of devices: none is ever certain, so the policy goes on drawing others."""


@dataclass(frozen=True, slots=True)
class LearnedPlacement:
    """The result of a policy, and its progress.

    Attributes:
        solution: the best placement that it drew.
        mean_secs: for each update, mean seconds of its possible placements; NaN if none is
            possible.
        best_secs: for each update, seconds of the best placement up to it.
        num_samples: placements simulated.
    """

    solution: Solution
    mean_secs: tuple[float, ...]
    best_secs: tuple[float, ...]
    num_samples: int


def default_groups(num_devices: int) -> int:
    """How many groups the hierarchical model makes.

    >>> default_groups(2), default_groups(16)
    (40, 256)
    """
    return min(256, 20 * num_devices)


def learn_placement(
    problem: PlacementProblem,
    *,
    updates: int = 300,
    samples: int = 16,
    num_groups: int = 0,
    width: int = 32,
    rate: float = 0.005,
    valid_after: int = 1000,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> LearnedPlacement:
    """Train a policy on a problem; the same seed gives the same placement.

    Args:
        problem: the placement problem.
        updates: updates of the network; the budget is ``updates * samples`` simulated placements.
        samples: placements of an update, K.
        num_groups: number of the grouper's groups, such as ``default_groups``; no grouper if 0.
        width: width of the LSTMs.
        rate: learning rate of Adam.
        valid_after: updates after which impossible placements are ignored.
        seed: seed of the network and of all that it draws.
        tick: called after every update.

    Raises:
        PlanError: no placement that was drawn is possible.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = _Policy(problem, num_groups, width)
        return _trained(problem, policy, updates, samples, rate, valid_after, tick)


def _trained(
    problem: PlacementProblem,
    policy: _Policy,
    updates: int,
    samples: int,
    rate: float,
    valid_after: int,
    tick: Callable[[], object],
) -> LearnedPlacement:
    work = problem.group_secs.sum(axis=0)
    unit_secs = float(work[np.isfinite(work)].min(initial=inf))
    unit_secs = unit_secs if unit_secs < inf else problem.bound_secs
    optimizer = torch.optim.Adam(policy.parameters(), lr=rate)
    baseline: float | None = None
    best, best_secs = np.zeros(len(problem.groups), dtype=np.int64), inf
    means, bests = [], []
    for update in range(updates):
        drawn, log_p = policy(samples)
        placements = drawn.numpy()
        secs = problem.secs(placements)
        can_be = np.isfinite(secs)
        least = int(secs.argmin())
        if secs[least] < best_secs:
            best, best_secs = placements[least], float(secs[least])
        means.append(float(secs[can_be].mean()) if can_be.any() else float("nan"))
        bests.append(best_secs)
        cost = np.sqrt(np.where(can_be, secs / unit_secs, FAILED))
        learned = can_be | (update < valid_after)
        if learned.any():
            mean = float(cost[learned].mean())
            baseline = mean if baseline is None else _moved(baseline, mean)
            weights = torch.from_numpy(np.where(learned, cost - baseline, 0.0) / learned.sum())
            optimizer.zero_grad()
            (weights * log_p).sum().backward()
            nn.utils.clip_grad_norm_(policy.parameters(), MOST_NORM)
            optimizer.step()
        tick()
    solution = problem.solution(best, "policy")
    return LearnedPlacement(solution, tuple(means), tuple(bests), updates * samples)


def _moved(baseline: float, mean: float) -> float:
    return BASELINE_DECAY * baseline + (1 - BASELINE_DECAY) * mean


# --- networks -----------------------------------------------------------------------------------


class _Policy(nn.Module):
    """A network that draws placements of a problem."""

    def __init__(self, problem: PlacementProblem, num_groups: int, width: int) -> None:
        super().__init__()
        self.register_buffer("features", torch.from_numpy(features(problem)).float())
        traffic = problem.traffic / max(problem.traffic.max(), 1e-300)
        self.register_buffer("traffic", torch.from_numpy(traffic).float())
        num_features = self.features.shape[1]
        self.grouper = Grouper(num_features, num_groups, width) if num_groups else None
        num = num_groups or len(problem.groups)
        self.placer = Placer(num_features + num, problem.num_devices, width)

    features: Tensor
    traffic: Tensor

    def forward(self, samples: int) -> tuple[Tensor, Tensor]:
        """Devices, ``[sample, group of the problem]``, and log p, ``[sample]``."""
        if self.grouper is None:
            inputs = torch.cat([self.features, self.traffic], dim=1)
            placed: tuple[Tensor, Tensor] = self.placer(inputs.expand(samples, -1, -1))
            return placed
        groups, log_p = self.grouper(self.features, samples)
        member = nn.functional.one_hot(groups, self.grouper.num_groups).float()
        sums = member.transpose(1, 2) @ self.features
        traffic = member.transpose(1, 2) @ self.traffic @ member
        devices, log_q = self.placer(torch.cat([sums, traffic], dim=2))
        return devices.gather(1, groups), log_p + log_q


def features(problem: PlacementProblem) -> Array:
    """For every group its times, memory, traffic and place in the order, scaled to at most 1."""
    secs = np.where(np.isfinite(problem.group_secs), problem.group_secs, 0.0)
    last = np.array([members[0] for members in problem.groups]) / len(problem.operations)
    columns = [*secs.T, problem.group_bytes, problem.traffic.sum(axis=1), last]
    return np.stack([column / max(column.max(), 1e-300) for column in columns], axis=1)


class Grouper(nn.Module):
    """A network that draws a group for every row of features, independent of other rows."""

    def __init__(self, num_features: int, num_groups: int, width: int) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.score = nn.Sequential(
            nn.Linear(num_features, width), nn.ReLU(), nn.Linear(width, num_groups)
        )

    def forward(self, features: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """Groups, ``[sample, row]``, and log p, ``[sample]``."""
        groups, log_p = draw(self.score(features).expand(samples, -1, -1))
        return groups, log_p.sum(dim=1)


class Placer(nn.Module):
    """A network that draws a device for every group, one after another."""

    def __init__(self, num_features: int, num_devices: int, width: int) -> None:
        super().__init__()
        self.width, self.num_devices = width, num_devices
        self.embed = nn.Linear(num_features, width)
        self.encode = nn.LSTM(width, width, batch_first=True)
        self.before = nn.Embedding(num_devices + 1, width)
        self.decode = nn.LSTMCell(2 * width, width)
        self.key, self.query = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.weigh = nn.Linear(width, 1, bias=False)
        self.score = nn.Linear(2 * width, num_devices)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Devices, ``[sample, group]``, and log p, ``[sample]``.

        Args:
            inputs: ``[sample, group, feature]``.
        """
        encoded, (hidden, cell) = self.encode(self.embed(inputs))
        keys, state = self.key(encoded), (hidden[0], cell[0])
        # The number behind the last device says that no device has been drawn yet.
        device = torch.full((len(inputs),), self.num_devices)
        devices, log_p = [], torch.zeros(len(inputs))
        for group in range(inputs.shape[1]):
            state = self.decode(torch.cat([encoded[:, group], self.before(device)], 1), state)
            scores = self.weigh(torch.tanh(keys + self.query(state[0])[:, None]))
            seen = (scores.softmax(dim=1) * encoded).sum(dim=1)
            scored = self.score(torch.cat([state[0], seen], 1))
            device, chosen = draw(MOST_LOGIT * torch.tanh(scored / MOST_LOGIT))
            devices.append(device)
            log_p = log_p + chosen
        return torch.stack(devices, dim=1), log_p


def draw(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a number by each row's probabilities, with its log p; ``[..., number] -> [...]``."""
    log_p = logits.log_softmax(dim=-1)
    drawn = log_p.detach().exp().flatten(0, -2).multinomial(1).view(log_p.shape[:-1])
    return drawn, log_p.gather(-1, drawn[..., None]).squeeze(-1)
