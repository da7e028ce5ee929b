"""Options: older names of options of plans, which the command line still takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from superscaler_core.plan import Keep

AXIAL = ("dap", "dap_pipeline", "nf1b")
"""Plans whose option ``recompute`` meant ``block_inputs``."""


def savings(takes: Mapping[str, Any]) -> list[str]:
    """The older option names that a plan accepts, given its options."""
    words = ["recompute", "rerun"] if "keep" in takes else []
    return [*words, "rerun_coshard"] if "keep_coshard" in takes else words


def levels(plan: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Keep]]:
    """Translate older options to ``keep``; return all other options, and further levels to set."""
    older = ("recompute", "rerun", "rerun_coshard")
    found = {name: value for name, value in given.items() if name not in older}
    recompute = Keep.BLOCK_INPUTS if plan in AXIAL else Keep.SEGMENT_INPUTS
    said = [recompute] if given.get("recompute") else []
    said = [Keep.BLOCK_INPUTS, *said] if given.get("rerun") else said
    if said and "keep" not in found:
        found["keep"] = said.pop(0)
    if not given.get("rerun_coshard", True):
        found.setdefault("keep_coshard", Keep.EVERYTHING)
    return found, said
