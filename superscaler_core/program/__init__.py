"""Program: a plan with its communication, and its step written out.

Wherever the shards that are written differ from the shards that are read, an rvdcomm plan moves
them. Then each stage is written out, forward and backward, in one order for all devices.
"""

from superscaler_core.program.materialized import Materialized, materialize
from superscaler_core.program.step_program import StepProgram

__all__ = ["Materialized", "StepProgram", "materialize"]
