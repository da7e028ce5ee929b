"""Modules: parts of a model, chosen by patterns of module paths."""

from __future__ import annotations

from dataclasses import dataclass

from superscaler_core.graph.graph import Graph, Op, is_in, paths
from superscaler_core.grouped import grouped


@dataclass(frozen=True, slots=True, init=False)
class Modules:
    """Modules whose path fits a pattern with wildcards, such as ``Modules("layers.*")``.

    They tell ``find_blocks`` the parts to use instead of those that it would find by structure.

    >>> Modules("layers.*.msa_*", "layers.*.outer").patterns
    ('layers.*.msa_*', 'layers.*.outer')
    """

    patterns: tuple[str, ...]

    def __init__(self, *patterns: str) -> None:
        object.__setattr__(self, "patterns", patterns)

    def __contains__(self, op: Op) -> bool:
        """Whether an op is in a matching module, or in a module inside one."""
        return is_in(op.module, self.patterns)

    def ops(self, graph: Graph) -> tuple[Op, ...]:
        """The ops in matching modules."""
        return tuple(op for op in graph.ops if op in self)

    def instances(self, graph: Graph) -> tuple[tuple[Op, ...], ...]:
        """The ops of each matching module, in order of the first op."""

        def path(op: Op) -> str:
            return next(path for path in paths(op.module) if is_in(path, self.patterns))

        return tuple(map(tuple, grouped((path(op), op) for op in self.ops(graph)).values()))

    def __str__(self) -> str:
        return ", ".join(self.patterns)
