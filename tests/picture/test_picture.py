import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest
from hypothesis import given, settings

import rvdcomm as rv
from rvdcomm.layout import Topology
from rvdcomm.picture import PictureError, draw, svg
from rvdcomm.picture.cells import PALETTE
from rvdcomm.picture.flows import LEVEL_COLORS, MAX_ARROWS
from rvdcomm.picture.scene import MAX_RANKS, scene_of
from rvdcomm.picture.shapes import Rect, Stroke, Text
from tests.strategies import transitions

HOSTS = Topology.preset("h100", 2, 4)
RACKS = Topology.preset("h100", 4, 4)


def planned(src, dst, shape, topology=None, ranks=(None, None), cuts="chunk"):
    layouts = (rv.Layout(shape, rvd, r, cuts) for rvd, r in zip((src, dst), ranks, strict=True))
    return rv.plan(*layouts, topology=topology)


CASES = {
    "columns to rows": lambda: planned("R(1)V(1)D(1,8)", "R(1)V(1)D(8,1)", (4096, 4096), HOSTS),
    "sum on two levels": lambda: planned("R(1)V(8)D(1,1)", "R(8)V(1)D(1,1)", (4096, 4096), HOSTS),
    "reduce_scatter": lambda: planned("R(2)V(4)D(1,1)", "R(2)V(1)D(4,1)", (64, 64), HOSTS),
    "ragged transfer": lambda: planned(
        *("R(1)V(1)D(4,1)", "R(1)V(1)D(2,3)", (10, 14), None),
        ranks=(range(4), range(4, 10)),
        cuts="balanced",
    ),
    "1-d": lambda: planned("R(1)V(1)D(2)", "R(1)V(1)D(3)", (12,)),
    "1-d on two levels": lambda: planned("R(1)V(8)D(1)", "R(4)V(1)D(2)", (64,), HOSTS),
    "two groups": lambda: planned(
        "R(1)V(4)D(1)", "R(4)V(1)D(1)", (64,), HOSTS, ranks=(range(4), range(4, 8))
    ),
    "scalar": lambda: planned("R(1)V(3)D()", "R(3)V(1)D()", ()),
    "empty cells": lambda: planned("R(1)V(1)D(6)", "R(1)V(1)D(4)", (4,)),
    "no element": lambda: planned("R(1)V(1)D(2,1)", "R(1)V(1)D(1,2)", (0, 5)),
    "3-d": lambda: planned("R(1)V(2)D(1,2,2)", "R(2)V(1)D(4,1,1)", (16, 10, 14), HOSTS),
    "slice": lambda: planned("R(8)V(1)D(1,1)", "R(1)V(1)D(8,1)", (640, 320), HOSTS),
    "nothing": lambda: planned("R(1)V(1)D(4,1)", "R(1)V(1)D(4,1)", (64, 64)),
    "16 ranks": lambda: planned("R(2)V(8)D(1,1)", "R(16)V(1)D(1,1)", (4096, 4096), RACKS),
}


@pytest.fixture(params=CASES)
def plan(request):
    return CASES[request.param]()


def shapes(plan, kind, tag):
    return [s for s in scene_of(plan).shapes if isinstance(s, kind) and s.tag == tag]


def notes(plan):
    return " ".join(s.text for s in shapes(plan, Text, "note"))


def pairs(plan):
    """(step, src_rank, dst_rank) of all messages that are no part of an all_reduce."""
    return {
        (collective.step, *pair)
        for collective in plan.program.collectives
        for pair in collective.traffic()
        if plan.path.steps[collective.step].kind != "all_reduce"
    }


def states(plan):
    return [plan.src.placement, *(step.dst.placement for step in plan.path.steps)]


# --- what is in a picture -----------------------------------------------------------------------


def test_svg_is_well_formed(plan):
    root = ET.fromstring(svg(plan))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_one_arrow_a_message(plan):
    arrows = shapes(plan, Stroke, "message")
    assert len(arrows) == len(pairs(plan))
    assert svg(plan).count('class="message"') == len(arrows)


def test_arrows_say_who_sends_what_to_whom():
    hints = {arrow.hint for arrow in shapes(CASES["1-d"](), Stroke, "message")}
    assert hints == {"0 -> 1: 8 B", "1 -> 2: 16 B"}


def test_one_cell_a_rank_and_state(plan):
    num_cells = sum(len(placement.ranks) for placement in states(plan))
    assert len(shapes(plan, Rect, "cell")) == num_cells


def test_title_and_figures_are_the_plans(plan):
    texts = " ".join(s.text for s in scene_of(plan).shapes if isinstance(s, Text))
    assert f"{plan.src.rvd} → {plan.dst.rvd}" in texts
    assert f"gap    {plan.gap:.3g}x" in texts
    for step in plan.path.steps:
        assert step.dst.text in texts


def test_an_all_reduce_is_one_bar_a_group():
    plan = planned("R(1)V(8)D(1,1)", "R(8)V(1)D(1,1)", (4096, 4096))
    assert [step.kind for step in plan.path.steps] == ["all_reduce"]
    assert len(shapes(plan, Stroke, "bar")) == 1
    assert shapes(plan, Stroke, "message") == []
    assert notes(plan) == ""


def test_every_host_has_a_frame():
    assert len(shapes(CASES["columns to rows"](), Rect, "host")) == 2


# --- how it looks -------------------------------------------------------------------------------


def test_texts_do_not_overlap(plan):
    assert_legible(plan)


@settings(max_examples=40)
@given(transitions())
def test_every_transition_has_a_legible_picture(transition):
    src, dst, topology = transition
    plan = rv.plan(src, dst, topology=topology)
    ET.fromstring(svg(plan))
    assert_legible(plan)


def assert_legible(plan):
    picture = scene_of(plan)
    texts = [s for s in picture.shapes if isinstance(s, Text)]
    for a, b in combinations(texts, 2):
        assert not _meet(a.bounds, b.bounds), (a.text, b.text)
    for text in texts:
        left, top, right, bottom = text.bounds
        assert min(left, top) >= 0
        assert right <= picture.width
        assert bottom <= picture.height


def _meet(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def fills(plan):
    """For every cell in the order of drawing, its outline and the coloured boxes in it."""
    out, found = [], []
    for s in scene_of(plan).shapes:
        if isinstance(s, Rect) and s.tag == "cell":
            out.append((s, found))
            found = []
        elif isinstance(s, Rect) and s.tag == "box":
            found.append(s)
    return out


@pytest.mark.parametrize("name", ["columns to rows", "reduce_scatter", "ragged transfer", "1-d"])
def test_a_cell_is_filled_by_what_the_rank_holds(name):
    plan = CASES[name]()
    num_elements = [p.num_elements(rank) for p in states(plan) for rank in p.ranks]
    total = rv.Layout(plan.src.shape, "R(1)V(1)D(" + ",".join("1" * len(plan.src.shape)) + ")")
    total = total.placement.num_elements(0)
    for (cell, boxes), size in zip(fills(plan), num_elements, strict=True):
        area = sum(box.width * box.height for box in boxes)
        assert area == pytest.approx(cell.width * cell.height * size / total)


def test_boxes_lie_inside_their_cells(plan):
    for cell, boxes in fills(plan):
        for box in boxes:
            assert cell.x - 1e-6 <= box.x
            assert cell.y - 1e-6 <= box.y
            assert box.x + box.width <= cell.x + cell.width + 1e-6
            assert box.y + box.height <= cell.y + cell.height + 1e-6


def test_equal_pieces_have_equal_colors():
    cells = fills(CASES["sum on two levels"]())
    after_exchange = cells[16:24]
    colors = [[box.fill for box in boxes] for _, boxes in after_exchange]
    assert colors[:4] == colors[4:]
    assert len({color for found in colors for color in found}) == 4


def test_columns_to_rows_keeps_the_colors_of_the_columns():
    cells = fills(CASES["columns to rows"]())
    columns = [box.fill for _, boxes in cells[:8] for box in boxes]
    assert columns == list(PALETTE[:8])
    for _, boxes in cells[-8:]:
        assert [box.fill for box in sorted(boxes, key=lambda box: box.x)] == columns


def test_value_parts_are_hatched_and_numbered():
    plan = CASES["reduce_scatter"]()
    assert len(shapes(plan, Stroke, "hatch")) == 8 * 4 + 1  # and one in the legend
    labels = [text.text for text in shapes(plan, Text, "label")]
    assert labels == [f"part {part}" for part in (0, 1, 2, 3) * 2]


def test_a_wider_arrow_is_more_bytes():
    width = {arrow.hint: arrow.width for arrow in shapes(CASES["1-d"](), Stroke, "message")}
    assert width["1 -> 2: 16 B"] > width["0 -> 1: 8 B"]


def test_colors_tell_levels_apart():
    arrows = shapes(CASES["columns to rows"](), Stroke, "message")
    assert [arrow.color for arrow in arrows] == [LEVEL_COLORS[2]] * 8 + [LEVEL_COLORS[1]] * 24


# --- what is left out ---------------------------------------------------------------------------


def test_a_small_picture_leaves_nothing_out():
    assert notes(CASES["columns to rows"]()) == ""


def test_merged_messages_are_said():
    plan = planned("R(1)V(1)D(1,16)", "R(1)V(1)D(16,1)", (4096, 4096))
    assert len(pairs(plan)) == 240 > MAX_ARROWS
    assert len(shapes(plan, Stroke, "bar")) == 1
    assert "Merged: 240 messages" in notes(plan)


def test_repeated_messages_of_windows_are_said():
    src, dst = rv.Layout((64, 64), "R(1)V(4)D(1,1)"), rv.Layout((64, 64), "R(4)V(1)D(1,1)")
    plan = next(
        plan
        for limit in range(32 << 10, 64 << 10, 1 << 10)
        if (plan := _plan_or_none(src, dst, limit)) and plan.path.steps[0].num_slices > 1
    )
    assert len(shapes(plan, Stroke, "message")) == len(pairs(plan)) == 12
    assert "later windows" in notes(plan)


def _plan_or_none(src, dst, memory_limit):
    try:
        return rv.plan(src, dst, memory_limit=memory_limit)
    except rv.MemoryLimitError:
        return None


def test_ranks_beyond_the_page_are_said():
    plan = planned("R(1)V(1)D(128)", "R(128)V(1)D(1)", (4096,), Topology.preset("h100", 16, 8))
    assert len(shapes(plan, Text, "rank")) == MAX_RANKS
    assert "Left out: 64 of 128 ranks" in notes(plan)
    assert "128 pieces" in notes(plan)
    assert_legible(plan)


def test_hidden_dims_are_said():
    assert "Cells show dims 0 and 1 of 3; cuts of dim 2 are not seen." in notes(CASES["3-d"]())


def test_dims_that_no_step_cuts_are_hidden_first():
    plan = planned("R(1)V(1)D(1,1,4)", "R(1)V(1)D(1,4,1)", (3, 8, 8))
    assert "Cells show dims 1 and 2 of 3." in notes(plan)


# --- files --------------------------------------------------------------------------------------


def test_equal_plans_give_equal_text_in_any_process():
    code = (
        "import rvdcomm as rv, sys; from rvdcomm.picture.draw import svg; "
        "src, dst = (rv.Layout((6, 10), x) for x in ('R(2)V(2)D(1,2)', 'R(1)V(1)D(8,1)')); "
        "sys.stdout.buffer.write(svg(rv.plan(src, dst)).encode())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] != b""


def test_draw_writes_the_svg(tmp_path):
    plan = CASES["1-d"]()
    draw(plan, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8") == svg(plan)


@pytest.mark.parametrize("name", ["sum on two levels", "scalar"])
def test_draw_writes_a_png_of_the_same_size(tmp_path, name):
    pytest.importorskip("matplotlib")
    plan = CASES[name]()
    draw(plan, str(tmp_path / "plan.png"))
    data = (tmp_path / "plan.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    size = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    picture = scene_of(plan)
    assert size == pytest.approx((2 * picture.width, 2 * picture.height), abs=2)


def test_a_png_without_matplotlib_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PictureError, match=r"pip install 'rvdcomm\[plot\]'"):
        draw(CASES["1-d"](), tmp_path / "plan.png")


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(PictureError, match=r"use a name in \.svg or \.png"):
        draw(CASES["1-d"](), tmp_path / "plan.gif")
