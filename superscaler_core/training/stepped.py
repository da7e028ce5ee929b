"""Stepped: the optimizers that step a rank's boxes of parameters, and which of them may.

A rank stores boxes of parameters, and optimizers see tensors. An optimizer that works element by
element does the same to a box as to the whole. Some need more: products or norms of whole tensors,
or of all parameters together; on boxes they would be silently wrong. torch calls a hook before
every step of every optimizer, which refuses those by the name of their class. The norm by which
``torch.nn.utils.clip_grad_norm_`` clips is refused likewise; torch has no hook there, so the
function that computes it is wrapped.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.run.tables import Stored, Tables
from superscaler_core.training.needs import is_known, needs_of
from superscaler_core.training.same_call import digest_of

Optimizer = torch.optim.Optimizer

_REMEDY = (
    "Wrap it, optim.whole(CLASS, model, OPTIONS), or use one that works element by element (SGD, "
    "Adam, AdamW, Lion)."
)


class Stepped:
    """What optimizers do to the parameters that this rank stores.

    Args:
        tables: tables of the program.
        stored: the boxes of parameters that this rank stores, by name.
        originals: the parameters of the captured model, which are no longer read.
    """

    def __init__(
        self,
        tables: Tables,
        stored: Mapping[str, nn.Parameter],
        originals: Mapping[str, nn.Parameter],
    ) -> None:
        self._parameters, self._stored = tables.parameters, stored
        self._ranks = tables.loss[0].layouts[1].ranks
        self._names = digest_of("\n".join(stored))
        self._hashes = {name: digest_of(name) for name in stored}
        self._optimizers: dict[int, _Known] = {}
        self._num_steps = 0
        _install()
        _STORES.add(self)
        own = weakref.ref(self)
        for name, parameter in stored.items():
            _OWNERS[parameter] = own, name
        for name, parameter in originals.items():
            _OWNERS[parameter] = own, f"{_ORIGINAL}{name}"

    def restart(self) -> None:
        """All ranks took new values together, so steps before do not matter any more."""
        self._num_steps = 0

    def digests(self) -> tuple[int, int]:
        """A digest of what this rank stores, and one of how optimizers stepped it so far."""
        total = self._num_steps
        for key, known in [*self._optimizers.items()]:
            optimizer = known.optimizer()
            if optimizer is None:
                del self._optimizers[key]
                continue
            kind = type(optimizer).__name__
            for group, names in zip(optimizer.param_groups, known.groups, strict=False):
                # Linear in the names: how they are grouped does not matter.
                total += digest_of(f"{kind} {_options(group)}") * names
        return self._names, total % (1 << 62)

    def before_step(self, optimizer: Optimizer, names: list[list[str]]) -> None:
        """An optimizer is about to step parameters, given by name for each of its groups.

        Raises:
            PlanError: it needs more of them than this rank stores.
        """
        self._num_steps += 1
        sums = tuple(sum(self._hashes[name] for name in group) for group in names)
        known = self._optimizers.get(id(optimizer))
        if known is None or known.groups != sums or known.optimizer() is not optimizer:
            self._check(optimizer, [name for group in names for name in group])
            self._optimizers[id(optimizer)] = _Known(weakref.ref(optimizer), sums)

    def _check(self, optimizer: Optimizer, names: Iterable[str]) -> None:
        kind, needs_all = needs_of(optimizer)
        split = next((name for name in names if not _is_whole(self._parameters[name])), None)
        if kind is None:
            if split is not None and not is_known(optimizer):
                kind = type(optimizer).__name__
                warn_once(
                    type(optimizer),
                    f"steps parts of parameters ({self._part(split)}), which is right if it works "
                    "element by element; if it needs whole tensors, wrap it: "
                    f"optim.whole({kind}, model, ...)",
                )
            return
        if split is not None:
            raise PlanError(
                f"{kind} needs whole tensors, and {self._part(split)}: its steps would not be "
                f"those of one device. {_REMEDY}"
            )
        if needs_all and (missing := self._missing()) is not None:
            raise PlanError(
                f"{kind} needs all parameters together, and {self._part(missing)}: its steps would "
                f"not be those of one device. {_REMEDY}"
            )

    def check_norm(self, grads: Iterable[Tensor]) -> None:
        """Refuse the norm of gradients that are boxes.

        Raises:
            PlanError: some of the gradients are of these parameters, and are not all.
        """
        given = {id(grad) for grad in grads}
        if any(id(p.grad) in given for p in self._stored.values() if p.grad is not None):
            missing = self._missing()
            if missing is not None:
                raise PlanError(
                    "torch.nn.utils.clip_grad_norm_ and get_total_norm see the gradients of this "
                    f"rank alone, and {self._part(missing)}: call clip_grad_norm_ of the parallel "
                    "model or trainer, which has the norm over the whole model."
                )

    def _missing(self) -> str | None:
        """The name of a trained parameter that some rank does not store whole."""
        for name, entry in self._parameters.items():
            ranks = {rank for sub_transfer in entry.whole for rank in sub_transfer.layouts[0].ranks}
            if entry.is_trained and not (_is_whole(entry) and ranks >= {*self._ranks}):
                return name
        return None

    def _part(self, name: str) -> str:
        entry = self._parameters[name]
        if entry.box is None:
            return f"this rank stores nothing of {name!r}"
        stored, whole = list(entry.stored_shape), list(entry.model_shape)
        if stored == whole:
            return f"not every rank stores {name!r}"
        return f"this rank stores {stored} of {name!r} {whole}"


def warn_once(kind: type, text: str) -> None:
    """Warn once about a class of optimizers."""
    mine = object()
    if _WARNED.setdefault(kind, mine) is mine:  # Atomic: ranks may be threads.
        warnings.warn(f"{kind.__name__} {text}.", stacklevel=3)


_WARNED: dict[type, object] = {}
"""Classes of optimizers of which a warning was given."""


@dataclass(frozen=True)
class _Known:
    """An optimizer that stepped, with the sum of the names' digests for each group."""

    optimizer: Callable[[], Optimizer | None]
    groups: tuple[int, ...]


@cache
def _is_whole(entry: Stored) -> bool:
    """Whether every rank that stores something of a parameter stores all of it."""
    region = str(rv.Box.of_shape(entry.shape))
    return all(
        sub_transfer.box == region and all(count == 1 for count in sub_transfer.layouts[0].rvd.d)
        for sub_transfer in entry.whole
    )


def _options(group: Mapping[str, Any]) -> str:
    """A group's options as a text that is equal on all ranks."""
    return " ".join(
        f"{key}={_text(value)}"
        for key, value in group.items()
        if key not in ("params", "param_names")
    )


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        # The value of a tensor on a GPU would make this rank wait for the GPU.
        return repr(value.tolist()) if value.device.type == "cpu" else "tensor"
    is_plain = isinstance(value, bool | int | float | str | tuple | list | None)
    return repr(value) if is_plain else type(value).__name__


# --- the hooks of torch ---------------------------------------------------------------------------

_ORIGINAL = "\0"
_OWNERS: Any = WeakIdKeyDictionary()
"""For every parameter, what watches it and its name there; names of originals are marked."""
_STORES: weakref.WeakSet[Stepped] = weakref.WeakSet()


@cache
def _install() -> None:
    """Ask torch for a call before every step of an optimizer, and wrap its norm; once."""
    register_optimizer_step_pre_hook(_before_step)
    wrapped = _checked(clip_grad._get_total_norm)
    clip_grad._get_total_norm = wrapped
    nn.utils.get_total_norm = wrapped


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    known = _KNOWN.get(optimizer)
    if known is None or known[0] != sizes:
        known = _KNOWN[optimizer] = sizes, _owners_of(optimizer)
    for ref, names in known[1]:
        if (owner := ref()) is not None:
            owner.before_step(optimizer, names)


_KNOWN: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
"""For optimizers that stepped, the sizes of their groups and what ``_owners_of`` found."""


def _owners_of(optimizer: Optimizer) -> list[tuple[Callable[[], Stepped | None], list[list[str]]]]:
    """Who stores an optimizer's parameters, each with the names of its own, by group."""
    found: dict[Callable[[], Stepped | None], list[list[str]]] = {}
    num_groups = len(optimizer.param_groups)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            owner, name = _OWNERS.get(parameter, (None, ""))
            if name.startswith(_ORIGINAL):
                _check_original(optimizer, name.removeprefix(_ORIGINAL))
            elif owner is not None:
                found.setdefault(owner, [[] for _ in range(num_groups)])[number].append(name)
    return [*found.items()]


def _check_original(optimizer: Optimizer, name: str) -> None:
    """Refuse an optimizer that would do nothing, because no step gives its parameters gradients."""
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        raise PlanError(
            f"{type(optimizer).__name__} steps {name!r} of the model that was captured, whose own "
            "parameters are no longer read and get no gradients: make the optimizer over "
            "parameters() of what parallelize returned."
        )


def _checked(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(norm)
    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for store in [*_STORES]:
            store.check_norm(given)
        return norm(given, *args, **kwargs)

    return get_total_norm
