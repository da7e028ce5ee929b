"""Laws of the paused collector: as it was before, whatever happens inside."""

from __future__ import annotations

import gc

import pytest

from superscaler_core.collector import paused_collector


def test_the_collector_is_as_it_was_after_a_pause() -> None:
    assert gc.isenabled()
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_is_as_it_was_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), paused_collector():
        raise ValueError("inside")
    assert gc.isenabled()


def test_who_has_no_collector_is_given_none() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
