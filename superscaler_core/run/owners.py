"""Owners: the ranks that have whole parameters for an optimizer, and the moves there and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.moves import Moves, Shard, move_many
from superscaler_core.run.tables import Stored, SubTransfer, box_of
from superscaler_core.run.transport import Transport


@dataclass(frozen=True)
class Owned:
    """One parameter that some ranks have whole.

    Attributes:
        entry: how ranks store it.
        owners: the ranks that have it whole.
        there: sub-transfers from storage to the owners.
        back: sub-transfers from the owner to storage, if there is one owner.
    """

    entry: Stored
    owners: tuple[int, ...]
    there: tuple[SubTransfer, ...]
    back: tuple[SubTransfer, ...]

    @property
    def stays(self) -> bool:
        """Whether the owner alone stores it, whole, so that nothing moves."""
        return all(each.is_idle for each in self.there)

    @property
    def moved_bytes(self) -> int:
        """Bytes that all ranks together receive when it moves there and back once."""
        return sum(map(_received, (*self.there, *self.back)))


def _received(sub_transfer: SubTransfer) -> int:
    """Bytes of the elements that ranks get and do not hold."""
    size = getattr(torch, sub_transfer.dtype).itemsize
    found = 0
    for rank in sub_transfer.layouts[1].ranks:
        wanted, held = sub_transfer.dst_box(rank), sub_transfer.src_box(rank)
        assert wanted is not None, "it is one of the ranks of dst"
        both = wanted.intersect(held) if held is not None else None
        found += wanted.num_elements - (both.num_elements if both is not None else 0)
    return found * int(size)


def owned_by(ranks: Sequence[int], entry: Stored, dtype: torch.dtype) -> Owned:
    """A parameter, stored in ``dtype``, that these ranks have whole."""
    there, back = [], []
    for sub in entry.whole:
        counts = ",".join("1" for _ in sub.region.shape)
        text = f"R({len(ranks)})V(1)D({counts})"
        whole = str(rv.Layout(sub.region.shape, text, ranks=list(ranks)))
        there.append(SubTransfer(sub.box, sub.src, whole, _name(dtype)))
        if len(ranks) == 1:
            back.append(SubTransfer(sub.box, whole, sub.src, _name(dtype)))
    return Owned(entry, tuple(ranks), tuple(there), tuple(back))


def dealt(entries: Mapping[str, Stored], dtypes: Mapping[str, torch.dtype]) -> dict[str, Owned]:
    """Deal parameters out to the ranks that store some of them.

    The largest is dealt first, each to the rank that has the fewest elements yet. A parameter that
    one rank stores alone stays there.

    Args:
        entries: how ranks store each parameter.
        dtypes: the dtype in which each is stored.
    """
    loads: Counter[int] = Counter()
    holders = {
        name: sorted({rank for sub in entry.whole for rank in sub.layouts[0].ranks})
        for name, entry in entries.items()
    }
    order = sorted(entries, key=lambda name: (len(holders[name]) > 1, -prod(entries[name].shape)))
    found = {}
    for name in order:
        owner = min(holders[name], key=lambda rank: loads[rank])
        loads[owner] += prod(entries[name].shape)
        found[name] = owned_by([owner], entries[name], dtypes[name])
    return {name: found[name] for name in entries}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- moves ----------------------------------------------------------------------------------------


def gathered(
    transport: Transport, owned: Mapping[str, Owned], shards: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Whole tensors on their owners, in the dims of the model; collective.

    Args:
        transport: moves tensors.
        owned: the parameters in whose boxes the tensors are.
        shards: this rank's box of each.
    """
    moves: Moves = {
        name: (_here(transport, each.there), _shard(each.entry, shards.get(name)))
        for name, each in owned.items()
    }
    found: dict[str, Tensor] = {}
    for name, box, piece in move_many(transport, moves):
        entry, region = owned[name].entry, rv.Box.of_shape(owned[name].entry.shape)
        if box == region:
            found[name] = piece
            continue
        whole = found.setdefault(name, piece.new_empty(entry.shape))
        whole[box.slices_within(region)] = piece
    return {name: owned[name].entry.unpacked(whole) for name, whole in found.items()}


def scattered(
    transport: Transport, owned: Mapping[str, Owned], wholes: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Boxes of tensors, where ranks store their parameters, from whole ones on owners; collective.

    Nothing is sent if every rank is an owner.
    """
    moves: dict[str, tuple[Sequence[SubTransfer], Shard | None]] = {}
    found: dict[str, Tensor] = {}
    for name, each in owned.items():
        whole = wholes.get(name)
        if len(each.owners) > 1:
            if whole is not None and each.entry.box is not None:
                found[name] = each.entry.taken(whole)
            continue
        region = rv.Box.of_shape(each.entry.shape)
        shard = None if whole is None else (each.entry.packed(whole), region)
        moves[name] = _here(transport, each.back), shard
    boxes: dict[str, Tensor] = {}
    for name, box, piece in move_many(transport, moves):
        entry = owned[name].entry
        assert entry.box is not None, "what is brought here is stored here"
        held = box_of(entry.box)
        if box == held:
            boxes[name] = piece
            continue
        made = boxes.setdefault(name, piece.new_empty(held.shape))
        made[box.slices_within(held)] = piece
    return found | {name: owned[name].entry.unpacked(box) for name, box in boxes.items()}


def _here(transport: Transport, moves: Sequence[SubTransfer]) -> Sequence[SubTransfer]:
    """The sub-transfers in which this rank takes part."""
    return [each for each in moves if transport.rank in each.ranks]


def _shard(entry: Stored, tensor: Tensor | None) -> Shard | None:
    if tensor is None or entry.box is None:
        return None
    return entry.boxed(tensor), box_of(entry.box)
