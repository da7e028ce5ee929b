"""Domains: shared-memory domains, the groups of ranks that map each other's memory."""

from __future__ import annotations

from collections.abc import Iterable

SharedDomains = tuple[tuple[int, ...], ...]
"""Domains are shared-memory domains: disjoint groups of ranks that map each other's memory."""


def together(ranks: Iterable[int], domains: SharedDomains) -> tuple[int, ...]:
    """``ranks``, and all ranks that share memory with one of them, ascending."""
    found = set(ranks)
    for domain in domains:
        if not found.isdisjoint(domain):
            found.update(domain)
    return tuple(sorted(found))
