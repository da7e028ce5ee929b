"""Laws of the context that need no processes: it replaces functions of torch, and restores them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

import rvdcomm as rv
from rvdcomm.interop.dtensor import Tally, planned, private


def hooked() -> list[Any]:
    """All functions that the context replaces."""
    return [*(getattr(module, private.HOOK) for module in private.callers()), DTensor.redistribute]


def test_outermost_context_restores_torch_on_exit() -> None:
    before = hooked()
    with planned() as tally:
        outer = hooked()
        assert all(a is not b for a, b in zip(outer, before, strict=True))
        with planned(executor="dist"):
            assert hooked() == outer
        assert hooked() == outer
    assert hooked() == before
    assert tally == Tally()
    with pytest.raises(KeyError), planned(), planned():
        raise KeyError
    assert hooked() == before


def test_contexts_may_exit_in_any_order() -> None:
    before = hooked()
    first, second = planned(), planned()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert hooked() != before
    second.__exit__(None, None, None)
    assert hooked() == before


def test_torch_without_the_hook_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hooked()
    module = importlib.import_module("torch.distributed.tensor._dispatch")
    monkeypatch.delattr(module, private.HOOK)
    with pytest.raises(rv.LayoutError, match=r"has no torch.distributed.tensor._dispatch.redist"):
        planned().__enter__()
    monkeypatch.undo()
    assert hooked() == before
