"""Hooks: those of all modules of a model, which a forward may register and remember.

Models of HuggingFace register hooks in their first forward, and keep that fact in an attribute. So
hooks are recorded and set back like attributes; else every trace would register them once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_TABLES = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


class Hooks:
    """The hooks that the modules of a model have now.

    Law (tests/superscaler_core/front_end/test_hooks.py): after ``put``, every module has them, and
    no others. Hooks whose handles have ids in ``without`` do not count.
    """

    def __init__(self, model: nn.Module, without: Collection[int] = ()) -> None:
        found = (vars(module).get(name) for module in model.modules() for name in _TABLES)
        self._kept: list[tuple[Any, dict[int, Any]]] = [
            (table, {key: hook for key, hook in table.items() if key not in without})
            for table in found
            if table is not None
        ]

    def put(self) -> None:
        """Give every module these hooks again."""
        for table, hooks in self._kept:
            if table != hooks:
                table.clear()
                table.update(hooks)


@contextmanager
def hooks_kept(model: nn.Module) -> Iterator[None]:
    """At the end of the block every module has the hooks that it had at the beginning."""
    before = Hooks(model)
    try:
        yield
    finally:
        before.put()
