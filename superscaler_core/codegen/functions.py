"""Functions: the segments of a device as Python functions, made from their generated text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from superscaler_core.codegen.rank_file import segments_text
from superscaler_core.plan import Device
from superscaler_core.program.materialized import Materialized
from superscaler_core.run.load import module_from


def functions_of(made: Materialized, device: Device) -> Mapping[str, Any]:
    """The functions of a device's segments, by name."""
    return vars(module_from(segments_text(made, device), device))
