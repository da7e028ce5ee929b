"""Program: the step of a plan written out, as a value; its checks, its text and its rewrites."""

from superscaler_core.program.event import Event, P2PSend
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.value import GIVEN, Role, Value
from superscaler_core.program.verb import BETWEEN, COMPUTING, OF_WEIGHTS, OWN, Verb

__all__ = [
    "BETWEEN",
    "COMPUTING",
    "GIVEN",
    "OF_WEIGHTS",
    "OWN",
    "Event",
    "P2PSend",
    "Role",
    "StepInstruction",
    "StepProgram",
    "Value",
    "Verb",
]
