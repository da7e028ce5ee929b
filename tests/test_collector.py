"""Laws of the paused collector: its state is restored, also after an error."""

from __future__ import annotations

import gc

import pytest

from rvdcomm.collector import paused_collector


def test_collector_is_enabled_again_after_a_pause() -> None:
    assert gc.isenabled()
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collector_is_enabled_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), paused_collector():
        raise ValueError("inside")
    assert gc.isenabled()


def test_disabled_collector_stays_disabled_after_a_pause() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
