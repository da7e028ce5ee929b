"""Integrations: plans inside the training loops of other libraries.

Each needs its library, which this package does not install by itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from superscaler_core.integrations.trainer import PlanTrainer

__all__ = ["PlanTrainer"]

_MODULES = {"PlanTrainer": "trainer"}
"""The module of each public name, which is imported on first use."""

_NEEDED = ("accelerate", "transformers")
"""Libraries that ``transformers.Trainer`` needs."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for library in _NEEDED:
        try:
            import_module(library)
        except ModuleNotFoundError as error:
            raise ImportError(f"{name} needs {library}: pip install 'rvdcomm[trainer]'.") from error
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
