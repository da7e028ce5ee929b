"""Hypothesis draws the same examples in every run, and no example is failed for being slow."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("rvdcomm", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("rvdcomm")
