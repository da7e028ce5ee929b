"""The cases of the RVD benchmark: ``cases.toml`` applied to given groups of ranks."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rvdcomm import Layout

CASES_FILE = Path(__file__).with_name("cases.toml")
IN_GROUP = "in group"

Groups = dict[str, tuple[Sequence[int], Sequence[int]]]
"""(src ranks, dst ranks) of each relation."""

Row = Mapping[str, Any]
"""A case in a result file, with the times of all methods; bench/README.md lists its keys."""


@dataclass(frozen=True)
class Case:
    """One transition to measure; ``src`` and ``dst`` are full layout texts."""

    category: str
    relation: str
    size: str
    src: str
    dst: str

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """The parsed src and dst layouts."""
        return Layout.parse(self.src), Layout.parse(self.dst)

    @property
    def name(self) -> str:
        """A short name for progress and errors."""
        return f"{self.category} {self.relation} {self.size}"

    def to_json(self) -> dict[str, Any]:
        """The fields as values that JSON can store."""
        return asdict(self)


def definitions() -> dict[str, Any]:
    """The tables of ``cases.toml``."""
    return tomllib.loads(CASES_FILE.read_text())


def make_cases(groups: Groups, sizes: Sequence[str]) -> Iterator[Case]:
    """All cases: every category for every size and every relation in ``groups``.

    Args:
        groups: (src ranks, dst ranks) of each relation.
        sizes: names of sizes in ``cases.toml``.
    """
    tables = definitions()
    for size in sizes:
        if size not in tables["sizes"]:
            known = ", ".join(tables["sizes"])
            raise SystemExit(f"unknown size {size!r}; the sizes are: {known}")
        shape = tables["sizes"][size]
        for relation, (src_ranks, dst_ranks) in groups.items():
            for category, (src, dst) in tables["categories"].items():
                counts = {"n": len(src_ranks), "m": len(dst_ranks)}
                layouts = (
                    Layout(shape, src.format(**counts), src_ranks),
                    Layout(shape, dst.format(**counts), dst_ranks),
                )
                yield Case(category, relation, size, *map(str, layouts))


def local_groups(n: int) -> Groups:
    """Groups on one host: the first ranks are src; the next ranks are dst, or dst equals src."""
    groups: Groups = {}
    for relation, (a, b) in definitions()["relations"].items():
        src = range(a * n)
        groups[relation] = (src, range(a * n, (a + b) * n) if b else src)
    return groups


def cluster_groups(hosts: int, ranks_per_host: int) -> Groups:
    """Groups on a cluster: the in-group cases over all hosts, the others from host 0 to host 1."""
    k, half = ranks_per_host, max(ranks_per_host // 2, 1)
    groups: Groups = {IN_GROUP: (range(hosts * k), range(hosts * k))}
    if hosts > 1:
        groups["n->n"] = (range(k), range(k, 2 * k))
        groups["n->2n"] = (range(half), range(k, k + 2 * half))
        groups["2n->n"] = (range(2 * half), range(k, k + half))
    return groups
