"""Search: the cheapest sequence of rebinds between two bindings of one grid.

State: a binding's targets, one for every axis. An edge is one step; its cost is exact (whole
ticks), so that equal costs tie and ties break by rounds, then by number of steps, then by text.
A* with ``RebindPricer.bound_ticks``; the direct exchange from any state to the goal is always an
edge, so that a path always exists.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import combinations

from rvdcomm.binding import Binding, Grid, R, V
from rvdcomm.primitives import RebindPricer, Targets, kind_of_rebind

MAX_FREE_AXES = 5
"""Up to this many axes every subset may move at once; beyond, axes of one class move together."""

MAX_THOROUGH_AXES = 3
"""Up to this many axes the search also tries digits that neither rule nor goal suggests."""

_Key = tuple[int, int, int, tuple[Targets, ...]]


def cheapest_rebinds(src: Binding, dst: Binding, pricer: RebindPricer) -> tuple[int, list[Binding]]:
    """The cheapest path: its cost in ticks, and its bindings from ``src`` to ``dst``.

    >>> from rvdcomm.layout import Layout
    >>> from rvdcomm.topology import Topology
    >>> from rvdcomm.binding import refine
    >>> host = Topology.single_host(8, 0, 1)
    >>> pair = refine(Layout((64,), "R(2)V(4)D(1)"), Layout((64,), "R(8)V(1)D(1)"), host)
    >>> ticks, path = cheapest_rebinds(*pair, RebindPricer(pair[0].grid, host, 64))
    >>> pricer_bytes = 1.25 * 64
    >>> RebindPricer(pair[0].grid, host, 64).secs(ticks) == pricer_bytes
    True
    """
    start, goal = src.targets, dst.targets
    classes = _axis_classes(src, dst, pricer)
    done: dict[Targets, _Key] = {}
    # Every entry is (bound of a full path, key so far, state); keys compare as costs do.
    heap: list[tuple[int, _Key, Targets]] = [
        (pricer.bound_ticks(start, goal), (0, 0, 0, ()), start)
    ]
    best_key: dict[Targets, _Key] = {start: heap[0][1]}
    upper = _upper_bound(start, goal, pricer)
    while heap:
        _, key, state = heapq.heappop(heap)
        if state in done:
            continue
        done[state] = key
        if state == goal:
            break
        ticks, rounds, steps, trail = key
        for successor in _successors(state, goal, classes, pricer.grid):
            if successor in done:
                continue
            step_ticks, step_rounds = pricer.ticks(state, successor)
            new = (ticks + step_ticks, rounds + step_rounds, steps + 1, (*trail, successor))
            full = new[0] + pricer.bound_ticks(successor, goal)
            if full > upper or best_key.get(successor, new) < new:
                continue
            best_key[successor] = new
            if successor == goal:
                upper = min(upper, new[0])
            heapq.heappush(heap, (full, new, successor))
    ticks, _, _, trail = done[goal]
    return ticks, _bindings(src, dst, trail)


def _upper_bound(start: Targets, goal: Targets, pricer: RebindPricer) -> int:
    """Cost of a path that exists: the direct exchange, with masks of their own after it."""
    ticks, state = 0, start
    for successor in _mask_last(start, goal):
        ticks += pricer.ticks(state, successor)[0]
        state = successor
    return ticks


def _mask_last(start: Targets, goal: Targets) -> list[Targets]:
    """Reach the goal with one step that moves bytes; axes that the goal binds to V come last."""
    masked = [a for a, (s, t) in enumerate(zip(start, goal, strict=True)) if t == V != s]
    if not masked:
        return [goal]
    middle = tuple(R if a in masked else t for a, t in enumerate(goal))
    return [goal] if start == middle else [middle, goal]


def _successors(
    state: Targets, goal: Targets, classes: list[tuple[int, ...]], grid: Grid
) -> Iterator[Targets]:
    """States one step away that may lie on a cheapest path: ``RULES`` for every set of axes.

    With few axes also any one of them to any digit, which finds what brute force finds
    (tests/test_search.py); with more that costs milliseconds, and hardly ever gains.
    """
    seen: set[Targets] = {state}
    is_small = sum(map(len, classes)) <= MAX_THOROUGH_AXES
    for axes in _subsets(classes):
        for rule in RULES if is_small else RULES[1:]:
            yield from _fresh(state, rule(state, goal, axes, grid), seen)
    for successor in _mask_last(state, goal):
        yield from _fresh(state, successor, seen)
    if is_small:
        for successor in _to_any_digits(state, classes, grid):
            yield from _fresh(state, successor, seen)


def _to_any_digits(state: Targets, classes: list[tuple[int, ...]], grid: Grid) -> Iterator[Targets]:
    for (axis,) in classes:
        for i, digit in enumerate(grid.digits):
            if digit.size == grid.axes[axis].size:
                yield _with(state, {axis: i})


def _fresh(state: Targets, successor: Targets | None, seen: set[Targets]) -> Iterator[Targets]:
    """The successor, if it is a new one and has a price."""
    if successor is not None and successor not in seen:
        seen.add(successor)
        if _is_priced(state, successor):
            yield successor


def _with(state: Targets, changes: dict[int, int]) -> Targets:
    return tuple(changes.get(a, t) for a, t in enumerate(state))


def _is_priced(state: Targets, successor: Targets) -> bool:
    """Whether a digit is bound at most once, and V is entered by masks alone."""
    digits = [t for t in successor if t >= 0]
    if len(set(digits)) != len(digits):
        return False
    enters_v = any(t == V != s for s, t in zip(state, successor, strict=True))
    return not enters_v or kind_of_rebind(state, successor) == "mask"


def _to_goal(state: Targets, goal: Targets, axes: tuple[int, ...], grid: Grid) -> Targets | None:
    """The axes go where the goal has them."""
    return _with(state, {a: goal[a] for a in axes})


def _to_goal_displacing(
    state: Targets, goal: Targets, axes: tuple[int, ...], grid: Grid
) -> Targets | None:
    """As ``_to_goal``; whoever holds a digit that they want takes one that they leave."""
    changes = {a: goal[a] for a in axes}
    wanted = {t for t in changes.values() if t >= 0}
    left = [state[a] for a in axes if state[a] >= 0 and state[a] not in wanted]
    for a in (a for a, t in enumerate(state) if a not in changes and t in wanted):
        free = [t for t in left if _size(t, grid) == grid.axes[a].size]
        if not free:
            return None
        changes[a] = free[0]
        left.remove(free[0])
    return _with(state, changes)


def _size(target: int, grid: Grid) -> int:
    """Size of a digit; of a scratch digit, 0: it belongs to one axis alone."""
    return grid.digits[target].size if target < len(grid.digits) else 0


def _to_replicas(
    state: Targets, goal: Targets, axes: tuple[int, ...], grid: Grid
) -> Targets | None:
    """Digits are gathered."""
    if any(state[a] < 0 for a in axes):
        return None
    return _with(state, dict.fromkeys(axes, R))


def _to_scratch(state: Targets, goal: Targets, axes: tuple[int, ...], grid: Grid) -> Targets | None:
    """Replicas are sliced, or parts summed over flat pieces."""
    if any(state[a] not in (R, V) for a in axes):
        return None
    return _with(state, {a: grid.scratch(a) for a in axes})


RULES = (_to_goal_displacing, _to_goal, _to_replicas, _to_scratch)


def _subsets(classes: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    for count in range(1, len(classes) + 1):
        for chosen in combinations(classes, count):
            yield tuple(sorted(axis for axes in chosen for axis in axes))


def _axis_classes(src: Binding, dst: Binding, pricer: RebindPricer) -> list[tuple[int, ...]]:
    """Axes that move together: one each, or all that agree in level and roles if there are many."""
    free = [
        a
        for a, (s, t) in enumerate(zip(src.targets, dst.targets, strict=True))
        # An axis that keeps a digit has no reason to move; a replica may share work meanwhile, and
        # where there are few axes a part may be summed near by and masked again.
        if s != t or s == R or (s == V and len(src.targets) <= MAX_THOROUGH_AXES)
    ]
    if len(free) <= MAX_FREE_AXES:
        return [(a,) for a in free]
    classes: dict[tuple[object, ...], list[int]] = {}
    for a in free:
        axis = src.grid.axes[a]
        level = sum(axis.stride >= block for block in src.grid.blocks)
        roles = tuple(
            {R: "R", V: "V"}.get(t, f"dim {src.grid.digits[t].dim}" if t >= 0 else "")
            for t in (src.targets[a], dst.targets[a])
        )
        classes.setdefault((level, *roles), []).append(a)
    return [tuple(axes) for axes in classes.values()]


def _bindings(src: Binding, dst: Binding, trail: tuple[Targets, ...]) -> list[Binding]:
    """The path's bindings, with one nesting of scratch cuts for all of them.

    Axes that leave their scratch digits last are cut outermost, so that what is gathered first is
    contiguous.
    """
    grid = src.grid
    last_use = {
        a: i
        for i, targets in enumerate((src.targets, *trail))
        for a, t in enumerate(targets)
        if t == grid.scratch(a)
    }
    order = tuple(sorted(last_use, key=lambda a: (-last_use[a], a)))
    states = [src, *(Binding(grid, targets) for targets in trail)]
    states[-1] = dst
    return [state.with_scratch_order(order) for state in states]
