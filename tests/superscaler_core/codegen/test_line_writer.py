"""LineWriter: lines as Python statements."""

from __future__ import annotations

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.codegen.line_writer import LineWriter
from superscaler_core.codegen.names import Names
from superscaler_core.program import Role, Value
from superscaler_core.run import (
    Add,
    BlockFunction,
    CallExpression,
    Fixed,
    Function,
    Join,
    Line,
    PartExpression,
    SumExpression,
    Tuple,
    Variable,
)
from superscaler_core.schedules import ActionKind
from tests.superscaler_core.small import branched, on_one

A, B = (Variable(Value(Role.RESULT, name)) for name in ("up.a", "up.b"))
GRAD, TOTAL = Variable(A.value, "g_{}", "segment"), Variable(A.value, "g_{}_sum")
WHOLE, HALF = rv.Box.parse("[0:4]"), rv.Box.parse("[2:4]")
LINES = [
    (Line(CallExpression("total_loss")), "run.total_loss()"),
    (Line(CallExpression("send", ("e0", Fixed.MICROBATCH, Fixed.NONE))),
     'run.send("e0", mb + 1, None)'),
    (Line(CallExpression("update", (("w", "v"),), (("keeps", 2),))),
     'run.update(["w", "v"], keeps=2)'),
    (Line(CallExpression("receive", ("e0",)), (A,)), 'up_a = run.receive("e0")'),
    (Line(CallExpression("kept", ("s",)), (A,), unpacks=True), '(up_a,) = run.kept("s")'),
    (Line(CallExpression("backward", (Function("f"), Tuple((GRAD,))))),
     "run.backward(f, (g_up_a,))"),
    (Line(Add(GRAD, PartExpression(B, HALF, WHOLE)), (TOTAL,)), "g_up_a_sum = g_up_a + up_b[2:4]"),
    (Line(Add(TOTAL, GRAD), (TOTAL,)), "g_up_a_sum += g_up_a"),
    (Line(SumExpression((A, B)), (TOTAL,)), "g_up_a_sum = (up_a + up_b)"),
    (Line(Join(WHOLE, ((A, HALF),)), (B,)), 'up_b = ops.join("[0:4]", [(up_a, "[2:4]")])'),
    (
        Line(CallExpression(BlockFunction(((0, ActionKind.FORWARD), (1, ActionKind.BACKWARD))),
         (3, 1))),
        "stage0_forward_with_stage1_backward(run, 3, 1)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "text"), LINES, ids=[text for _, text in LINES])
def test_a_line_is_one_statement(line: Line, text: str) -> None:
    made = ss.compile(on_one(ss.Plan(branched(), [0]))).materialized
    writer = LineWriter(made, Names(), "mb + 1")
    found = writer.statement(line)
    assert found.text == text
    assert found.makes == writer.names(line.makes)
    assert found.reads == writer.names(line.reads)
