"""Whole: any optimizer over whole parameters, which are dealt out to ranks, under every plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rvdcomm.units import bytes_text
from superscaler_core.errors import PlanError
from superscaler_core.optim.param_groups import Parameters, named_groups, united
from superscaler_core.run.owners import Owned, dealt, gathered, owned_by, scattered
from superscaler_core.training.checksum import checksum
from superscaler_core.training.needs import is_known, needs_of, needs_of_class
from superscaler_core.training.optimizer_state import Keeper
from superscaler_core.training.stepped import warn_once
from superscaler_core.training.trainer import Trainer

_log = logging.getLogger("superscaler_core")

_ABSENT, _HAS, _LACKS = 0, 1, 2
"""What a rank says of a parameter: it does not store it, it has a gradient of it, it has none."""


def whole(
    of: Callable[..., torch.optim.Optimizer],
    model: Any,
    params: Parameters = None,
    *,
    together: bool | None = None,
    **options: Any,
) -> Whole:
    """An optimizer that needs whole matrices, or all parameters together, under every plan.

    Its steps are those of ``of(model.parameters(), **options)`` on one device. Each matrix is dealt
    to one of the ranks that store some of it: gradients move to it, it alone has the optimizer's
    state and makes the step, and the new values move back. Where a plan stores matrices whole, each
    on one rank (``zero=1,whole=true``), nothing of this moves. An optimizer that needs all
    parameters together (SAM, LBFGS, Prodigy) has a whole copy of all of them on every rank.

    Collective over the ranks of the model.

    >>> # optimizer = ss.optim.whole(torch.optim.Muon, model, matrices, lr=0.02)

    Args:
        of: the class of the optimizer, torch's or a user's own, or a function that makes one of
            parameters and options.
        model: a ``Parallel`` or ``Trainer``.
        params: what it steps, as torch's optimizers take it: parameters of ``model.parameters()``,
            pairs of ``named_parameters``, names, or groups of these as dicts with options. A rank
            need not list what it does not store. All parameters if None.
        together: whether it needs all parameters together; if None, known by the name of its class.
        options: those of the optimizer.

    Raises:
        PlanError: a parameter is none of the model's, ranks give other groups or options, or the
            class cannot be made; on all ranks.
    """
    trainer = getattr(model, "trainer", model)
    if not isinstance(trainer, Trainer):
        raise PlanError(
            f"whole takes what parallelize or load returned, not {type(model).__name__}: on one "
            "device, make the optimizer itself."
        )
    if trainer.is_asynchronous:
        raise PlanError(
            "whole: steps of this program update weights themselves (update_with), each stage at a "
            "time of its own; use an optimizer that works element by element."
        )
    return Whole(of, trainer, params, together, options)


class Whole(torch.optim.Optimizer):
    """An optimizer over whole parameters; ``whole`` makes it.

    ``param_groups`` have this rank's boxes of parameters, so schedulers, gradient scalers and
    ``zero_grad`` work as with any optimizer. The state is on the owners (``inner.state``).

    Attributes:
        inner: the optimizer of the whole parameters that this rank owns.
        owned: these parameters, by name.
        bytes_per_step: bytes that all ranks together receive in a step: gradients on their way to
            the owners, and new values on their way back.
    """

    def __init__(
        self,
        of: Callable[..., torch.optim.Optimizer],
        trainer: Trainer,
        params: Parameters,
        together: bool | None,
        options: Mapping[str, Any],
    ) -> None:
        self._trainer, self._kind = trainer, getattr(of, "__name__", type(of).__name__)
        self._stored = dict(trainer.named_parameters())
        known = isinstance(of, type) and needs_of_class(of)[1]
        self._is_together = known if together is None else together
        # Checksums of the stored values that owners have. None until they have values, so that the
        # first step brings them on all ranks.
        self._known: dict[str, int] | None = None
        with trainer.calls.prepared(f"whole({self._kind})") as request:
            request.equal["together"] = str(self._is_together)
            mine = named_groups(params, trainer)
        groups = united(mine, trainer, f"whole({self._kind})")
        with trainer.calls.prepared(f"whole({self._kind})") as request:
            request.equal["its groups"] = repr([[names, _plain(more)] for names, more in groups])
            request.equal["its options"] = repr(_plain(options))
            every = [name for names, _ in groups for name in names]
            self._frozen = {name for name in every if name not in trainer.trained.names}
            trained = [name for name in every if name not in self._frozen]
            self._make(trained, lambda own: of(own, **options), groups)
            if together is None and not self._is_together and needs_of(self.inner)[1]:
                # A function made it, so its class is known only now.
                self._is_together = True
                self._make(trained, lambda own: of(own, **options), groups)
            stored = [
                {**group, "params": [self._stored[n] for n in names if n in self._stored]}
                for group, (names, _) in zip(self.inner.param_groups, groups, strict=True)
            ]
            super().__init__(stored, dict(self.inner.defaults))
        if together is None and not is_known(self.inner):
            warn_once(
                type(self.inner),
                "is taken for an optimizer that steps each parameter by itself, as Muon does; if "
                "it needs all together, such as a norm over all, say together=True (and False "
                "where it does not)",
            )
        self.bytes_per_step = sum(each.moved_bytes for each in self._dealt.values())
        if trainer.rank == min(trainer.calls.ranks):
            _log.info("%s", self.report())

    def _make(
        self, names: list[str], of: Callable[[Any], torch.optim.Optimizer], groups: Any
    ) -> None:
        """Deal parameters out, and make the optimizer of those that this rank owns."""
        self._dealt, rank = self._deal(names), self._trainer.rank
        self.owned = {
            name: nn.Parameter(self._new(name))
            for name, each in self._dealt.items()
            if rank in each.owners
        }
        self.inner = of(
            [
                {"params": [self.owned[n] for n in names if n in self.owned], **more}
                for names, more in groups
            ]
        )

    def report(self) -> str:
        """One line: what is dealt out, and what moves in a step."""
        count = f"{len(self._dealt)} parameters"
        size = bytes_text(sum(map(_nbytes, self.owned.values())))
        moved = bytes_text(self.bytes_per_step)
        if self._is_together:
            return f"{self._kind}: every rank has all {count} whole, {size}; a step moves {moved}"
        return (
            f"{self._kind}: {count} dealt out, {len(self.owned)} of them, {size}, to rank "
            f"{self._trainer.rank}; a step moves {moved} between all ranks"
        )

    @property
    def keeper(self) -> Keeper:
        """What keeps the state, for checkpoints."""
        self._take_options()
        return Keeper(self.inner, self.owned, True, self._give_options)

    def state_dict(self) -> dict[str, Any]:
        """The state of the parameters that this rank owns; ``save`` of the model has all."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` gave on this rank."""
        self.inner.load_state_dict(state_dict)
        self._give_options()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only torch's own constructor adds groups.

        Raises:
            PlanError: the optimizer is made, and its parameters are dealt out.
        """
        if hasattr(self, "inner") and len(self.param_groups) == len(self.inner.param_groups):
            raise PlanError(f"whole({self._kind}): give all groups when it is made.")
        super().add_param_group(param_group)

    # --- parameters -----------------------------------------------------------------------------

    def _deal(self, names: list[str]) -> dict[str, Owned]:
        entries = {name: self._trainer.entries[name] for name in names}
        dtypes = {name: self._trainer.stored_dtype(name) for name in names}
        ranks = self._trainer.calls.ranks
        if self._is_together:
            return {n: owned_by(ranks, entry, dtypes[n]) for n, entry in entries.items()}
        return dealt(entries, dtypes)

    def _new(self, name: str) -> Tensor:
        """Memory for a whole parameter; that of the stored one where it is whole here alone."""
        if self._is_shared(name):
            return self._stored[name].data
        entry, device = self._trainer.entries[name], self._trainer.device
        return torch.empty(entry.model_shape, dtype=self._trainer.stored_dtype(name), device=device)

    @property
    def _moving(self) -> dict[str, Owned]:
        """The parameters whose owners have memory of their own, beside that of the stored ones."""
        return {n: each for n, each in self._dealt.items() if self._is_together or not each.stays}

    def _is_shared(self, name: str) -> bool:
        each = self._dealt[name]
        return not self._is_together and each.stays and name in self._stored

    # --- steps ----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step on all ranks; collective.

        Args:
            closure: computes the loss and its gradients again, such as by ``model.step``.

        Returns:
            The loss of the closure, if there is one.
        """
        loss = None
        if closure is not None and not self._is_together:
            with torch.enable_grad():
                loss = closure()
        self._take_options()
        self._pull_values()
        self._pull_grads()
        if closure is None or not self._is_together:
            # Of a rank that owns nothing, a class may fail to take a norm.
            if self.owned:
                self.inner.step()
        else:
            loss = self.inner.step(self._again(closure))
        self._push()
        if self._is_together and closure is not None:
            self._push_grads()
        for parameter in self.owned.values():
            parameter.grad = None
        self._give_options()
        return loss

    def _again(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure for an optimizer that changes all parameters between its calls of it."""

        def again() -> Any:
            with torch.no_grad():
                self._push()
                self._push_grads()
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                self._pull_grads()
            return loss

        return again

    def _take_options(self) -> None:
        """Give the inner groups the options of the outer ones, which schedulers change."""
        for inner, outer in zip(self.inner.param_groups, self.param_groups, strict=True):
            inner.update(
                {key: value for key, value in outer.items() if key in inner and key not in _OWN}
            )

    def _give_options(self) -> None:
        for inner, outer in zip(self.inner.param_groups, self.param_groups, strict=True):
            outer.update({key: value for key, value in inner.items() if key not in _OWN})

    def _pull_values(self) -> None:
        """Bring values to the owners that were changed by others than this optimizer."""
        for name, owned in self.owned.items():
            if self._is_shared(name):
                owned.data = self._stored[name].data
        moving = self._moving
        # Not torch's counters of versions: changes through ``p.data`` are no new version.
        known = {n: checksum(p) for n, p in self._stored.items() if n in moving}
        with self._trainer.calls.prepared(f"{self._kind}.step") as request:
            self._check_frozen()
            request.asks = known != self._known
        if request.asks and moving:
            shards = {name: self._stored[name].detach() for name in known}
            for name, value in gathered(self._trainer.transport, moving, shards).items():
                self.owned[name].data.copy_(value)
            self._known = known

    def _check_frozen(self) -> None:
        for name in self._frozen & self._stored.keys():
            if self._stored[name].grad is not None:
                raise PlanError(
                    f"{self._kind}.step: {name!r} was frozen when the optimizer was made, so no "
                    "rank owns it, and it has a gradient now: make the optimizer again."
                )

    def _pull_grads(self) -> None:
        """Bring gradients to the owners; collective."""
        having = {name: self._dealt[name] for name in self._with_grads()}
        shards = {n: _dense(self._stored[n]) for n in having if n in self._stored}
        found = gathered(self._trainer.transport, having, shards)
        for name, owned in self.owned.items():
            grad = found.get(name)
            owned.grad = None if grad is None else grad.to(owned.device).view(owned.shape)

    def _with_grads(self) -> list[str]:
        """The names of parameters that have a gradient on the ranks that store them; collective."""
        votes = [self._vote(name) for name in self._dealt]
        rows = self._trainer.calls.rows(torch.tensor(votes, dtype=torch.uint8)).T.tolist()
        found = []
        for name, column in zip(self._dealt, rows, strict=True):
            if _HAS in column and _LACKS in column:
                raise PlanError(
                    f"{self._kind}.step: some of the ranks that store {name!r} have a gradient of "
                    "it and some have none; set it to None on all of them, or on none."
                )
            if _HAS in column:
                found.append(name)
        return found

    def _vote(self, name: str) -> int:
        parameter = self._stored.get(name)
        if parameter is None:
            return _ABSENT
        return _LACKS if parameter.grad is None else _HAS

    def _push(self) -> None:
        """Bring the owners' values to where they are stored; collective."""
        moving = self._moving
        wholes = {name: p.detach() for name, p in self.owned.items() if name in moving}
        for name, value in scattered(self._trainer.transport, moving, wholes).items():
            self._stored[name].copy_(value.view(self._stored[name].shape))
        self._known = {n: checksum(p) for n, p in self._stored.items() if n in moving}

    def _push_grads(self) -> None:
        """Leave where parameters are stored what the inner optimizer left as gradients."""
        for name, owned in self.owned.items():
            if name in self._stored:
                entry = self._trainer.entries[name]
                grad = None if owned.grad is None else entry.taken(owned.grad)
                self._stored[name].grad = grad


_OWN = {"params", "param_names"}
"""Entries of a group that are about its parameters."""


def _dense(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "all ranks that store it have a gradient"
    grad = parameter.grad
    return grad.to_dense() if grad.is_sparse else grad


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _plain(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Options as texts that are equal on all ranks for equal values."""
    is_plain = (bool, int, float, str, tuple, list, type(None))
    return [
        (key, repr(value) if isinstance(value, is_plain) else type(value).__name__)
        for key, value in sorted(options.items())
    ]
