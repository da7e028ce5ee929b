"""planned: a context in which DTensor's own redistributions run our plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from threading import Lock
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from rvdcomm import LayoutError, Network, ShapeMismatchError, Topology
from rvdcomm.interop.dtensor import private
from rvdcomm.interop.dtensor.move import Draft, DTensorMove, Options
from rvdcomm.interop.dtensor.placements import is_masked
from rvdcomm.interop.dtensor.redistribute import redistribute
from rvdcomm.run import World

MAX_SLABS = 16
"""Most slabs of a planned redistribution. With more, DTensor's single gather is as fast: of 64 KiB
it takes as long as 18 of our calls (bench/results/local-4.json)."""


@dataclass
class Tally:
    """Counts of the redistributions in one ``planned`` context."""

    planned: int = 0
    """Redistributions that our plans ran."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Redistributions that were left to DTensor, by reason."""


@dataclass
class _Patches:
    """The replaced functions of torch, and the entered contexts; the last one's options apply."""

    contexts: tuple[tuple[Tally, Options], ...] = ()
    originals: list[tuple[Any, str, Any]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def enter(self, tally: Tally, options: Options) -> None:
        with self.lock:
            if not self.contexts:
                for module in private.callers():
                    self._replace(module, private.HOOK, _instead_of_local)
                self._replace(DTensor, "redistribute", _instead_of_redistribute)
            self.contexts = (*self.contexts, (tally, options))

    def leave(self, tally: Tally) -> None:
        with self.lock:
            # Not always the innermost: contexts that generators hold are left in any order.
            self.contexts = tuple(known for known in self.contexts if known[0] is not tally)
            while not self.contexts and self.originals:
                setattr(*self.originals.pop())

    def _replace(self, owner: Any, name: str, instead_of: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self.originals.append((owner, name, original))
        setattr(owner, name, instead_of(original))


_patches = _Patches()


@contextmanager
def planned(
    *, topology: Topology | Network | None = None, executor: str | None = None
) -> Iterator[Tally]:
    """In this context our plans run all redistributions of DTensor, those of its operators too.

    That holds for everything that runs inside, forward or backward. A redistribution that we cannot
    plan runs as it would outside, and is counted with its reason. Examples are calls under
    torch.compile, reductions that are neither a sum nor an average, masked embeddings, and strided
    shards with many gaps. ``DTensor.redistribute`` to another mesh, which DTensor cannot do, runs
    our plans too. ``async_op`` is accepted, but our redistributions are done when the call returns.

    The context applies to the whole process, other threads included, and may be nested. The
    functions of torch are restored when the outermost context is left. All ranks must enter the
    context at the same point, with equal arguments.

    Args:
        topology, executor: as of ``rvdcomm.redistribute``.

    Yields:
        A ``Tally`` of what ran inside.
    """
    tally = Tally()
    _patches.enter(tally, Options(topology, executor, MAX_SLABS))
    try:
        yield tally
    finally:
        _patches.leave(tally)


def _instead_of_local(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function that every redistribution of DTensor calls, in place of ``original``."""

    def redistribute_local_tensor(
        local_tensor: Tensor, current_spec: Any, target_spec: Any, **kwargs: Any
    ) -> Tensor:
        # Other threads may leave the last context meanwhile.
        contexts = _patches.contexts
        if not contexts:
            return original(local_tensor, current_spec, target_spec, **kwargs)
        options = contexts[-1][1]
        found = _move_or_reason(local_tensor, current_spec, target_spec, options)
        if isinstance(found, DTensorMove):
            for tally, _ in contexts:
                tally.planned += 1
            return found(private.waited(local_tensor))
        for tally, _ in contexts:
            tally.fallbacks[found] += 1
        return original(local_tensor, current_spec, target_spec, **kwargs)

    return redistribute_local_tensor


def _instead_of_redistribute(original: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """``DTensor.redistribute``, extended to other meshes, which ``original`` does not serve."""

    @wraps(original)
    def to_any_mesh(
        self: DTensor, device_mesh: Any = None, placements: Any = None, **kwargs: Any
    ) -> DTensor:
        contexts = _patches.contexts
        if not contexts or device_mesh is None or device_mesh == self.device_mesh:
            return original(self, device_mesh, placements, **kwargs)
        asked = [name for name, value in kwargs.items() if name != "async_op" and value is not None]
        if asked:
            raise LayoutError(f"redistribute to another mesh does not know {', '.join(asked)}.")
        for tally, _ in contexts:
            tally.planned += 1
        options = contexts[-1][1]
        return redistribute(
            self, device_mesh, placements, topology=options.topology, executor=options.executor
        )

    return to_any_mesh


def _move_or_reason(shard: Tensor, src: Any, dst: Any, options: Options) -> DTensorMove | str:
    """Our transition, or the reason why there is none; the same on all ranks."""
    if private.are_tracing():
        return "torch.compile is tracing"
    shard = private.waited(shard)
    if type(shard) not in (Tensor, Parameter):
        return f"the local tensor is a {type(shard).__name__}"
    masked = [p for p in (*src.placements, *dst.placements) if is_masked(p)]
    if masked:
        # Every call of an embedding has a mask of its own, which must not be kept as a key.
        return f"{masked[0]!r} makes summands only when it is reduced"

    def make() -> DTensorMove | str:
        try:
            draft = Draft.of(src, dst, shard.dtype, options)
        except LayoutError as error:
            return str(error)
        return DTensorMove(draft, tuple(shard.shape))

    key = ("dtensor", private.key_of(src), private.key_of(dst), shard.dtype, options)
    try:
        found: DTensorMove | str = World.of(options.group).once(key, make)
    except ShapeMismatchError as error:
        # Not kept: the shards of the next call may fit, and all ranks compare them again.
        return str(error)
    return found
