"""Functions: the segments of a device as Python functions, from their generated text."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it

from superscaler_core import ops
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.stage_writer import StageWriter
from superscaler_core.codegen.table_text import tables_text
from superscaler_core.plan import Device
from superscaler_core.program.materialized import Materialized
from superscaler_core.run.load import module_from
from superscaler_core.run.tables import Tables


def functions_of(made: Materialized, device: Device) -> Mapping[str, Any]:
    """The functions of a device's segments, by name."""
    return {}
