"""Errors of the plan engine. All are errors of the caller, therefore ``ValueError``s."""

from __future__ import annotations


class AnnotationError(ValueError):
    """An annotation cannot be read, or does not fit the shapes of its tensors."""


class CaptureError(ValueError):
    """A model cannot be captured: an op has no annotation, or tracing cannot follow it.

    Attributes:
        node: the name of the traced call that is at fault; empty if no single call is.
    """

    node = ""


class PlanError(ValueError):
    """An sProgram asks for something impossible: a wrong split, an op without a device."""


class CoverageError(PlanError):
    """The parts of an op leave out some of its work, or do some of it twice."""


class OrderError(PlanError):
    """The orders that a plan asks for form a cycle."""


class DeviceMemoryError(PlanError):
    """A device needs more memory than it has."""


class PluginError(PlanError):
    """A row of a table that an installed package brings cannot be used."""


class OpaqueWarning(UserWarning):
    """Some ops of a model are opaque: correct under every plan, but no plan can split them."""
