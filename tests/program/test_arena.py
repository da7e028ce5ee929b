"""Laws of arenas: the same places as a scan of all buffers, in almost linear time."""

from __future__ import annotations

import random

import pytest

from rvdcomm.program.arena import FreeRanges, Staged, _by_birth, _by_size


def random_buffers(seed: int, num: int) -> list[Staged]:
    """Some that live long between others that do not, of few or of many sizes, some empty."""
    rng = random.Random(seed)
    sizes = rng.choice([[96], [0, 1, 64, 65, 500], [*range(0, 4000, 7)]])
    found = []
    for i in range(num):
        first = rng.randrange(3 * num)
        last = first + rng.choice([0, 1, 5, num])
        found.append(Staged(first, last, f"b{i}", rng.choice(sizes)))
    return sorted(found)


@pytest.mark.parametrize("seed", range(6))
def test_buffers_lie_where_a_scan_of_all_that_are_alive_puts_them(seed: int) -> None:
    staged = random_buffers(seed, 200)
    # In any order a scan gives the definition of first fit.
    assert _by_birth(staged) == _by_size(staged)


def num_steps(num: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Ranges that are added or removed while short and long lived buffers alternate."""
    done = []
    for name in ("_add", "_remove"):
        known = getattr(FreeRanges, name)
        counting = lambda self, *args, known=known: (done.append(1), known(self, *args))[1]  # noqa: E731
        monkeypatch.setattr(FreeRanges, name, counting)
    _by_birth([Staged(i, i + (3 * num if i % 2 else 2), f"b{i}", 100 + i % 5) for i in range(num)])
    monkeypatch.undo()
    return len(done)


def test_steps_grow_in_proportion_to_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_steps(4000, monkeypatch) <= 2.1 * num_steps(2000, monkeypatch)
