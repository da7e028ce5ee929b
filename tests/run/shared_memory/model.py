"""A model of the protocol of csrc/signal/signal.cpp, and a search of all interleavings of steps.

Every step reads or writes one word of shared memory, as in the code. Words and steps have the names
of the code: ``num_calls``, ``history``, ``count``, ``failure``; ``begin``, ``location``, ``wait``,
``advance``, ``end``, ``fail``. Data are modelled as (program, call number), so that a read shows
from which call its data comes. ``memory`` is the staging memory, and ``source`` is a tensor of the
user that other ranks read in place. When a call ends, by success or by an error, the user gets the
source back and overwrites it with junk.

``explore`` visits every reachable state, with faults injected at every point. It checks three
properties:

- safety: a call that returns has read only data of its own call;
- liveness: if a rank failed or died, no rank waits until the timeout;
- without faults, all ranks return if they make the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

NUM_KEPT = 3
"""Slots of ``history``: the least number of slots that lets a rank be one call ahead."""

JUNK = ("junk", 0)
Data = tuple[str, int]
Op = tuple[str, int, int]
"""(step, peer, number of events)."""

CHECKS = frozenset({"history", "chain", "begin", "end", "near", "readers"})
"""The checks of the protocol; a mutation test leaves out one check."""

NUM_EVENTS = {
    "in place": 1, "mixed": 2, "staged": 2, "one way": 3, "alone": 1, "alone, long": 5, "aside": 1,
}  # fmt: skip
"""Programs that ranks may call, and the number of events that each rank counts in them."""


def program(name: str, rank: int, num_ranks: int) -> list[Op]:
    """The steps of one call."""
    others = [peer for peer in range(num_ranks) if peer != rank]
    if name.startswith("alone"):
        return _alone(name, others, num_ranks)
    if name == "aside":
        return _aside(rank, others, num_ranks)
    if name == "in place":
        return _in_place(others, num_ranks)
    read = [(rank - 1) % num_ranks] if name == "one way" else others
    ops: list[Op] = [("check", peer, 0) for peer in range(num_ranks)]
    ops += [("near", peer, 0) for peer in others]
    ops += [("publish", 0, 0), ("begin", 0, 0)]
    # Wait until the others have read the data that earlier calls staged.
    ops += [("wait", peer, 0) for peer in others]
    ops += [("write", 0, 0), ("advance", 0, 0)]
    for peer in read:
        ops += [("wait", peer, 1), ("read", peer, 0)]
    ops += [("advance", 0, 0)] * (NUM_EVENTS[name] - 1)
    if name == "mixed":
        # Others read memory that the user may overwrite as soon as the call returns.
        ops += [("wait", peer, 2) for peer in others]
    ops += [("end", peer, 0) for peer in range(num_ranks)]
    return [*ops, ("return", 0, 0)]


def _in_place(others: list[int], num_ranks: int) -> list[Op]:
    """A call in which sources are read in place; a source is ready when the call begins."""
    ops: list[Op] = [("check", peer, 0) for peer in range(num_ranks)]
    ops += [("near", peer, 0) for peer in others]
    ops += [("bring", 0, 0), ("publish", 0, 0), ("begin", 0, 0)]
    for peer in others:
        ops += [("locate", peer, 0), ("take", peer, 0)]
    ops += [("advance", 0, 0)]
    ops += [("wait", peer, 1) for peer in others]
    ops += [("end", peer, 0) for peer in range(num_ranks)]
    return [*ops, ("return", 0, 0)]


def _alone(name: str, others: list[int], num_ranks: int) -> list[Op]:
    """A call in which no rank waits for another, so that ranks run ahead of each other."""
    return [
        *(("check", peer, 0) for peer in range(num_ranks)),
        *(("near", peer, 0) for peer in others),
        *(("publish", 0, 0), ("begin", 0, 0)),
        *[("advance", 0, 0)] * NUM_EVENTS[name],
        *(("end", peer, 0) for peer in range(num_ranks)),
        ("return", 0, 0),
    ]


def _aside(rank: int, others: list[int], num_ranks: int) -> list[Op]:
    """A call in which rank 0 waits for nobody, and the others wait for its earlier calls."""
    ops = _alone("aside", others, num_ranks)
    if rank == 0:
        return ops
    at = ops.index(("begin", 0, 0)) + 1
    return [*ops[:at], ("wait", 0, 0), *ops[at:]]


@dataclass(frozen=True, slots=True)
class Rank:
    """The state of one rank: its header, which all ranks can read, and its private state."""

    # The header.
    count: int = 0
    num_calls: int = 0
    history: tuple[tuple[str, ...], ...] = ((),) * NUM_KEPT
    failure: bool = False
    is_alive: bool = True
    memory: Data = JUNK
    source: Data = JUNK
    # Private.
    call: int = 0
    op: int = 0
    is_raising: bool = False
    has_looked: bool = False
    at_start: tuple[int, ...] = ()
    read: tuple[Data, ...] = ()
    outcomes: tuple[str, ...] = ()


State = tuple[Rank, ...]


@dataclass(frozen=True)
class Scenario:
    """The calls of every rank, the number of faults to inject, and the checks of the protocol."""

    calls: tuple[tuple[str, ...], ...]
    num_faults: int = 0
    checks: frozenset[str] = CHECKS


@dataclass
class Found:
    """The result of an exploration."""

    num_states: int = 0
    violations: list[str] = field(default_factory=list)
    outcomes: set[tuple[tuple[str, ...], ...]] = field(default_factory=set)


def explore(scenario: Scenario) -> Found:
    """Visit every reachable state; stop at the first violation."""
    model = _Model(scenario)
    start = (model.start(), scenario.num_faults)
    seen, waiting = {start}, [start]
    found = Found()
    while waiting and not found.violations:
        state, faults = waiting.pop()
        found.num_states += 1
        moves = list(model.moves(state, faults))
        if not moves:
            found.violations += model.faults_at_end(state)
            found.outcomes.add(tuple(rank.outcomes for rank in state))
        for after in moves:
            if isinstance(after, str):
                found.violations.append(after)
            elif after not in seen:
                seen.add(after)
                waiting.append(after)
    return found


class _Model:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.checks = scenario, scenario.checks
        self.num_ranks = len(scenario.calls)
        self.programs = [
            [program(name, rank, self.num_ranks) for name in names]
            for rank, names in enumerate(scenario.calls)
        ]

    def start(self) -> State:
        return tuple(Rank(at_start=(0,) * self.num_ranks) for _ in range(self.num_ranks))

    def moves(self, state: State, faults: int) -> Iterator[tuple[State, int] | str]:
        """Every state that may follow, or a violation."""
        steps = 0
        for i, rank in enumerate(state):
            if not rank.is_alive or rank.call == len(self.programs[i]):
                continue
            after = self._step(state, i)
            if isinstance(after, str):
                yield after
            elif after is not None:
                steps += 1
                yield _put(state, i, after), faults
            if faults and not rank.is_raising:
                yield _put(state, i, replace(rank, is_raising=True)), faults - 1
                yield _put(state, i, replace(rank, is_alive=False)), faults - 1
        if steps:
            return
        # No rank can take a step, so all ranks that wait do so until the timeout.
        stuck = [i for i, r in enumerate(state) if r.is_alive and r.call < len(self.programs[i])]
        if stuck and any(rank.failure or not rank.is_alive for rank in state):
            yield f"ranks {stuck} wait until the timeout although a rank failed or died"
        for i in stuck:
            yield _put(state, i, replace(state[i], is_raising=True)), faults

    def faults_at_end(self, state: State) -> list[str]:
        """Violations in a final state."""
        is_same = len(set(self.scenario.calls)) == 1 and not self.scenario.num_faults
        raised = [i for i, rank in enumerate(state) if "raised" in rank.outcomes]
        return [f"ranks {raised} raised without any fault"] if is_same and raised else []

    # --- steps ----------------------------------------------------------------------------------

    def _step(self, state: State, i: int) -> Rank | str | None:
        """The rank after its next step; None if it must wait; a text if a property fails."""
        rank = state[i]
        if rank.is_raising:
            return self._raise(rank)
        name = self.scenario.calls[i][rank.call]
        step, peer, num_events = self.programs[i][rank.call][rank.op]
        done = replace(rank, op=rank.op + 1)
        if step in ("check", "end"):
            is_checked = ("begin" if step == "check" else "end") in self.checks
            if is_checked and state[peer].failure:
                return replace(rank, is_raising=True)
            if step == "end" and peer == self.num_ranks - 1:
                totals = 1 + NUM_EVENTS[name]
                return replace(done, at_start=tuple(n + totals for n in rank.at_start))
            return done
        if step == "near":
            # A peer that is too far behind may still need the slot that is written next.
            is_near = state[peer].num_calls + NUM_KEPT >= rank.num_calls + 1 + 2
            if rank.num_calls + 1 < NUM_KEPT or "near" not in self.checks or is_near:
                return done
            return self._not_yet(state, rank, peer)
        if step == "publish":
            return replace(done, history=self._published(rank, name))
        if step == "begin":
            return replace(done, num_calls=rank.num_calls + 1, count=rank.count + 1)
        if step == "advance":
            return replace(done, count=rank.count + 1)
        if step == "write":
            return replace(done, memory=(name, rank.num_calls))
        if step == "read":
            return replace(done, read=(*rank.read, state[peer].memory))
        if step == "bring":
            return replace(done, source=(name, rank.num_calls + 1))
        if step == "locate":
            return self._locate(state, i, peer)
        if step == "take":
            return replace(done, read=(*rank.read, state[peer].source))
        if step == "wait":
            if name == "in place" and "readers" not in self.checks:
                return done
            return self._wait(state, i, peer, num_events)
        assert step == "return"
        own = (name, rank.num_calls)
        if any(data != own for data in rank.read):
            return f"rank {i} returns {rank.read} from call {own}"
        memory = JUNK if name == "mixed" else rank.memory
        return _next_call(replace(rank, memory=memory, source=JUNK), "returned")

    def _raise(self, rank: Rank) -> Rank:
        """First set ``failure``; in the next step, the user gets the memory back and continues."""
        if not rank.failure:
            return replace(rank, failure=True)
        return _next_call(replace(rank, memory=JUNK, source=JUNK), "raised")

    def _published(self, rank: Rank, name: str) -> tuple[tuple[str, ...], ...]:
        slots = list(rank.history)
        before = slots[rank.num_calls % NUM_KEPT] if "chain" in self.checks else ()
        slots[(rank.num_calls + 1) % NUM_KEPT] = (*before, name)
        return tuple(slots)

    def _wait(self, state: State, i: int, peer: int, num_events: int) -> Rank | None:
        rank, other = state[i], state[peer]
        number = rank.num_calls if num_events else rank.num_calls - 1
        slot = number % NUM_KEPT
        is_same = other.history[slot] == rank.history[slot]
        count = rank.at_start[peer] + num_events + (1 if num_events else 0)
        is_reached = other.count >= count
        if is_reached and not rank.has_looked:
            # The count and the history are two words, so they are read in two steps.
            return replace(rank, has_looked=True)
        if rank.has_looked or other.num_calls >= number:
            if "history" in self.checks and not is_same:
                return replace(rank, is_raising=True, has_looked=False)
            if rank.has_looked:
                return replace(rank, op=rank.op + 1, has_looked=False)
        return self._not_yet(state, rank, peer)

    def _locate(self, state: State, i: int, peer: int) -> Rank | None:
        """Wait until the peer has begun the present call; from then on its source is ready."""
        rank, other = state[i], state[peer]
        if other.num_calls < rank.num_calls:
            return self._not_yet(state, rank, peer)
        slot = rank.num_calls % NUM_KEPT
        if "history" in self.checks and other.history[slot] != rank.history[slot]:
            return replace(rank, is_raising=True)
        return replace(rank, op=rank.op + 1)

    def _not_yet(self, state: State, rank: Rank, peer: int) -> Rank | None:
        """After a time slice of a wait: raise if a rank failed or the peer died; else wait on."""
        if any(other.failure for other in state) or not state[peer].is_alive:
            return replace(rank, is_raising=True)
        return None


def _next_call(rank: Rank, outcome: str) -> Rank:
    return replace(
        rank,
        call=rank.call + 1,
        op=0,
        is_raising=False,
        has_looked=False,
        read=(),
        outcomes=(*rank.outcomes, outcome),
    )


def _put(state: State, i: int, rank: Rank) -> State:
    return (*state[:i], rank, *state[i + 1 :])


def scenarios(num_ranks: int, usual: Sequence[str], others: Sequence[str]) -> Iterator[Scenario]:
    """All ranks make the ``usual`` calls; or the last rank replaces or misses one of the calls."""
    yield Scenario((tuple(usual),) * num_ranks)
    yield Scenario((tuple(usual),) * num_ranks, num_faults=1)
    for i in range(len(usual)):
        for other in others:
            odd = (*usual[:i], other, *usual[i + 1 :])
            yield Scenario((*(tuple(usual),) * (num_ranks - 1), odd))
        missed = (*usual[:i], *usual[i + 1 :])
        yield Scenario((*(tuple(usual),) * (num_ranks - 1), missed))
