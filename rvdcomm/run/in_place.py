"""In place: sources that other ranks read directly, instead of a copy that the owner stages.

A program copies the parts of a source that other ranks need into staging memory, because a tensor
of the caller is private to its process. If the tensor lies in a pool that the others map, this copy
is left out, and its readers read the tensor instead. Events are counted as before, so every rank
decides anew in every call. The owner then waits for the readers before it returns to its caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rvdcomm.program import SRC, Collective, Copy, Program, is_shard
from rvdcomm.run import pool
from rvdcomm.run.schedule import Action, Advance, Do

Copies = frozenset[tuple[int, str]]
"""Staging buffers, as (rank, name), that hold only parts of the source of their rank."""


@dataclass(frozen=True)
class InPlace:
    """The sources that the ranks of one domain can read in place, as seen by one rank.

    ``copies`` are the staged copies of sources that can be left out. ``owners`` are the ranks whose
    copies this rank reads, ``readers`` are the ranks that read the copies of this rank.
    """

    copies: Copies
    owners: frozenset[int]
    readers: frozenset[int]

    @classmethod
    def of(cls, program: Program, rank: int, domain: Sequence[int]) -> InPlace:
        """Find the staged copies that reads in place can replace, as ``rank`` sees them.

        All ranks of the domain find the same ``copies``, because they know each other's
        instructions.
        """
        copies = _copies(program, domain) if len(program.transitions) == 1 else frozenset()
        reads = {
            (i.src_rank, i.rank)
            for i in program.instructions
            if isinstance(i, Copy) and i.is_remote and (i.src_rank, i.src) in copies
        }
        return cls(
            copies,
            frozenset(owner for owner, reader in reads if reader == rank),
            frozenset(reader for owner, reader in reads if owner == rank),
        )

    def of_owners(self, owners: Iterable[int]) -> Copies:
        """The copies that a call leaves out if the sources of ``owners`` lie in their pools."""
        owners = frozenset(owners)
        return frozenset(one for one in self.copies if one[0] in owners)


def _copies(program: Program, domain: Sequence[int]) -> Copies:
    found: set[tuple[int, str]] = set()
    others: set[tuple[int, str]] = set()
    large = {rank for rank in domain if _has_large_source(program, rank)}
    for i in program.instructions:
        if isinstance(i, Collective):
            others.update((rank, name) for rank in i.ranks for name in i.buffers_of(rank))
        elif isinstance(i, Copy) and (i.op, i.src, i.src_rank) == ("copy", SRC, i.rank):
            (found if i.rank in large else others).add((i.rank, i.dst))
        else:
            others.add((i.rank, i.dst))
    return frozenset(one for one in found - others if not is_shard(one[1]))


def _has_large_source(program: Program, rank: int) -> bool:
    source = program.buffer.get((SRC, rank))
    if source is None or len(source.pieces) != 1 or program.dtype_of(SRC) != program.dtype:
        return False
    return source.num_elements * program.item_bytes >= pool.MIN_BYTES


def without(
    actions: Sequence[Action], program: Program, rank: int, copies: Copies, is_all: bool
) -> list[Action]:
    """The actions of ``rank`` in a call that leaves ``copies`` out.

    ``is_all`` says that ``actions`` are all actions of the program. If the copies and sums that are
    left then use no staging memory, the rank waits for no other rank, because sources do not change
    while they are read.
    """
    left = [
        action
        for action in actions
        if not (isinstance(action, Do) and (rank, action.instruction.dst) in copies)
    ]
    dos = [action for action in left if isinstance(action, Do)]
    if not is_all or not copies or any(_uses_staging(do, rank, copies) for do in dos):
        return left
    return [*dos, *(action for action in left if isinstance(action, Advance))]


def _uses_staging(do: Do, rank: int, copies: Copies) -> bool:
    used = {(rank, do.instruction.dst)}
    if isinstance(do.instruction, Copy):
        used.add((do.instruction.src_rank, do.instruction.src))
    return any(not is_shard(name) and (owner, name) not in copies for owner, name in used)
