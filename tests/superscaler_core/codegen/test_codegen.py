from __future__ import annotations

import ast
from itertools import pairwise

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.statement import Statement, freed
from superscaler_core.codegen.text import index_text, wrapped
from superscaler_core.graph import Invocation
from tests.superscaler_core.small import branched, on_one, two_linears


@pytest.mark.parametrize(
    "box, within, text",
    [
        ("[0:4,0:6]", "[0:4,0:6]", ""),
        ("[2:4,0:6]", "[0:4,0:6]", "[2:4]"),
        ("[2:4,3:6]", "[2:4,0:6]", "[:, 3:6]"),
        ("[5:6,3:4]", "[4:8,2:6]", "[1:2, 1:2]"),
    ],
)
def test_index_text_is_relative_to_the_enclosing_box(box: str, within: str, text: str) -> None:
    assert index_text(rv.Box.parse(box), rv.Box.parse(within)) == text


def test_generated_names_are_unique_identifiers() -> None:
    names = Names()
    wishes = ["layers.0.up", "layers_0_up", "1x", "class", "run", "", "a b"]
    made = [names.of(i, wish) for i, wish in enumerate(wishes)]
    assert len(set(made)) == len(made)
    assert all(name.isidentifier() and name not in ("class", "run") for name in made)
    assert names.of(0, "something else") == made[0]


def test_long_calls_are_wrapped_without_changing_the_syntax_tree() -> None:
    items = [f"argument_{i}" for i in range(20)]
    text = wrapped("f(", items, ")")
    assert max(map(len, text.splitlines())) <= 100
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(f"f({', '.join(items)})"))


def segments(plan: ss.Plan, device: int = 0) -> list[str]:
    text = ss.compile(plan).files[device]
    return [line for line in text.splitlines() if line.startswith("def stage0_segment")]


def test_each_recomputed_group_is_a_separate_segment() -> None:
    plan = on_one(ss.Plan(branched(), [0]))
    assert len(segments(plan)) == 1
    plan.recompute(plan.graph.ops[1:4], plan.graph.ops[4:6])
    assert len(segments(plan)) == 4
    text = ss.compile(plan).files[0]
    assert "recomputed=frozenset(['stage0_segment1', 'stage0_segment2'])" in text


def test_comments_name_the_modules_of_a_segment_and_the_notes_of_a_plan() -> None:
    plan = on_one(ss.Plan(two_linears(), [0]))
    plan.note("sums are taken twice")
    text = ss.compile(plan).files[0]
    assert "Not what the model says: sums are taken twice." in text
    assert [line.strip() for line in text.splitlines() if line.startswith("    # ")] == [
        "# up", "# act", "# down", "# loss",
    ]  # fmt: skip


def test_generated_files_are_deterministic() -> None:
    def files() -> dict[int, str]:
        plan = ss.Plan(branched(), range(4))
        for op in plan.graph.ops:
            plan.spread(op, plan.devices, [ss.Axis(2, (plan.dims.batch,)), ss.Axis(2)])
        return dict(ss.compile(plan).files)

    assert files() == files()


def test_device_without_work_has_a_step_without_computation() -> None:
    plan = on_one(ss.Plan(two_linears(), [0, 1]))
    text = ss.compile(plan).files[1]
    assert "def step(run):\n    run.begin()\n    run.total_loss()\n" in text


LINEAR = Invocation("F.linear", ("{x0}", "{x1}"))


@pytest.mark.parametrize("cut, calls", [(None, 1), ("n", 1), ("b", 1), ("k", 0)])
def test_bias_is_an_argument_of_linear_unless_the_sum_is_split(cut: str | None, calls: int) -> None:
    builder = ss.GraphBuilder("line")
    weight, bias = (builder.parameter(n, s, "float64") for n, s in [("w", (2, 4)), ("b", (2,))])
    x = builder.input("x", (6, 4), "float64")
    out = [((6, 2), "float64")]
    (y,) = builder.op("linear", "b k+, n k+ -> b n", [x, weight], out, LINEAR)
    (z,) = builder.op("add_bias", "b n, n -> b n", [y, bias], out, "{x0} + {x1}")
    (loss,) = builder.op("sum", "b+ n+ -> ()", [z], [((), "float64")], "{x0}.sum()")
    plan = ss.Plan(builder.build(loss), [0, 1])
    for op in plan.graph.ops:
        how = ss.split(cut, 2) if cut in op.sizes else ss.replicate(2)
        plan.op_assign(plan.op_trans(op, how), plan.devices)
    assert ss.compile(plan).files[1].count("F.linear(x, w, bias=b)") == calls


# --- deletion of variables ----------------------------------------------------------------------


def made(names: str, reads: str) -> Statement:
    return Statement(f"{names} = f({reads})", tuple(names.split(", ")), tuple(reads.split(", ")))


def test_a_variable_is_deleted_after_its_last_use() -> None:
    done = Statement("return u, w", reads=("u", "w"), is_last=True)
    lines = [made("y, z", "x"), made("w", "y, z"), made("v", "w, z"), made("u", "v"), done]
    texts = [line.text for line in lines]
    assert freed(lines) == [*texts[:2], "del y", texts[2], "del z", *texts[3:]]


def test_variables_that_no_statement_assigns_are_not_deleted() -> None:
    lines = [made("y", "x"), made("z", "x, y"), made("u", "z")]
    assert freed(lines) == [lines[0].text, lines[1].text, "del y", lines[2].text]


def test_nothing_is_deleted_right_before_the_end_of_a_function() -> None:
    comment = Statement("# y", is_last=True)
    assert freed([made("y", "x"), made("z", "y"), comment]) == ["y = f(x)", "z = f(y)", "# y"]


def test_in_place_sum_counts_as_a_read_of_its_target() -> None:
    total = Statement("y += z", ("y",), ("z",))
    lines = [made("y", "x"), made("z", "x"), total, made("u", "y"), made("v", "u")]
    assert freed(lines)[2:6] == ["y += z", "del z", "u = f(y)", "del y"]


def test_partial_sums_on_one_device_are_accumulated_and_deleted() -> None:
    plan = ss.Plan(two_linears(), [0])
    for op, loop in zip(plan.graph.ops, ["n", "n", "k", None], strict=True):
        for chunk in plan.op_trans(op, ss.split(loop, 3)) if loop else ():
            plan.op_assign(chunk, 0)
        plan.op_assign(op, 0)
    chunks = list(zip(*(plan.parts(op) for op in plan.graph.ops[:3]), strict=True))
    for before, after in pairwise(chunks):
        plan.op_order(before[-1], after[0])
    plan.recompute(*chunks)
    text = ss.compile(plan).files[0]
    assert "down_linear_sum = down_linear + down_linear_2" in text
    assert "down_linear_sum += down_linear_3" in text
    assert "del down_linear, down_linear_2" in text
