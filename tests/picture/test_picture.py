import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import cache
from itertools import combinations
from math import prod

import pytest
from hypothesis import given, settings

import rvdcomm as rv
from rvdcomm.network import Topology
from rvdcomm.picture import PictureError, draw, svg
from rvdcomm.plans import plan_over
from tests.strategies import transitions

pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Text

from rvdcomm.picture.cells import PALETTE
from rvdcomm.picture.flows import LEVEL_COLORS, MAX_ARROWS
from rvdcomm.picture.scene import MAX_RANKS, figure_of

HOSTS = Topology.preset("h100", 2, 4)
RACKS = Topology.preset("h100", 4, 4)
MANY_HOSTS = Topology.preset("h100", 16, 8)


def planned(src, dst, shape, topology=None, ranks=(None, None), cuts="chunk"):
    layouts = (rv.Layout(shape, rvd, r, cuts) for rvd, r in zip((src, dst), ranks, strict=True))
    return rv.plan(*layouts, topology=topology)


CASES = {
    "columns to rows": lambda: planned("R(1)V(1)D(1,8)", "R(1)V(1)D(8,1)", (4096, 4096), HOSTS),
    "sum on two levels": lambda: planned("R(1)V(8)D(1,1)", "R(8)V(1)D(1,1)", (4096, 4096), HOSTS),
    "reduce_scatter": lambda: planned("R(2)V(4)D(1,1)", "R(2)V(1)D(4,1)", (64, 64), HOSTS),
    "1-d": lambda: planned("R(1)V(1)D(2)", "R(1)V(1)D(3)", (12,)),
    "1-d on two levels": lambda: planned("R(1)V(8)D(1)", "R(4)V(1)D(2)", (64,), HOSTS),
    "slice": lambda: planned("R(8)V(1)D(1,1)", "R(1)V(1)D(8,1)", (640, 320), HOSTS),
    "ragged transfer": lambda: planned(
        *("R(1)V(1)D(4,1)", "R(1)V(1)D(2,3)", (10, 14), None),
        ranks=(range(4), range(4, 10)),
        cuts="balanced",
    ),
    "two groups": lambda: planned(
        "R(1)V(4)D(1)", "R(4)V(1)D(1)", (64,), HOSTS, ranks=(range(4), range(4, 8))
    ),
    "scalar": lambda: planned("R(1)V(3)D()", "R(3)V(1)D()", ()),
    "empty cells": lambda: planned("R(1)V(1)D(6)", "R(1)V(1)D(4)", (4,)),
    "no element": lambda: planned("R(1)V(1)D(2,1)", "R(1)V(1)D(1,2)", (0, 5)),
    "3-d": lambda: planned("R(1)V(2)D(1,2,2)", "R(2)V(1)D(4,1,1)", (16, 10, 14), HOSTS),
    "nothing": lambda: planned("R(1)V(1)D(4,1)", "R(1)V(1)D(4,1)", (64, 64)),
    "16 ranks": lambda: planned("R(2)V(8)D(1,1)", "R(16)V(1)D(1,1)", (4096, 4096), RACKS),
}


@cache
def case(name):
    return CASES[name]()


@pytest.fixture(params=CASES)
def plan(request):
    return case(request.param)


figure = cache(figure_of)
"""The picture of a plan, for tests that only look at it."""
text_of = cache(svg)


def found(plan, prefix):
    """The artists whose id starts with ``prefix``, by id in the order of drawing."""
    artists = figure(plan).findobj(lambda artist: (artist.get_gid() or "").startswith(prefix))
    return {artist.get_gid(): artist for artist in artists}


def texts(plan):
    """All texts of the picture, those of the legend too."""
    return [text.get_text() for text in figure(plan).findobj(Text)]


def notes(plan):
    return " ".join(note.get_text() for note in found(plan, "note").values())


def pairs(plan):
    """(step, src_rank, dst_rank) of all messages that are no part of an all_reduce."""
    return {
        (collective.step, *pair)
        for collective in plan_over(plan, ()).program.collectives
        for pair in collective.traffic()
        if plan.path.steps[collective.step].kind != "all_reduce"
    }


def states(plan):
    return [plan.src.placement, *(step.dst.placement for step in plan.path.steps)]


# --- what is in a picture -----------------------------------------------------------------------


@pytest.mark.many(6)
def test_picture_has_one_arrow_per_sender_and_receiver_of_a_step(plan):
    names = {"message-{}-{}-{}".format(*pair) for pair in pairs(plan)}
    assert set(found(plan, "message")) == names
    assert set(re.findall('id="(message[^"]*)"', text_of(plan))) == names


def test_picture_has_one_cell_per_rank_and_state(plan):
    names = {f"cell-{i}-{rank}" for i, state in enumerate(states(plan)) for rank in state.ranks}
    assert set(found(plan, "cell")) == names


def test_picture_prints_the_layouts_states_and_last_line_of_the_plan(plan):
    printed = texts(plan)
    assert f"{plan.src.rvd} → {plan.dst.rvd}" in printed
    assert str(plan).splitlines()[-1] in printed
    assert {step.dst.text for step in plan.path.steps} <= set(printed)


def test_an_all_reduce_is_one_bar_per_group():
    plan = planned("R(1)V(8)D(1,1)", "R(8)V(1)D(1,1)", (4096, 4096))
    assert [step.kind for step in plan.path.steps] == ["all_reduce"]
    assert list(found(plan, "bar")) == ["bar-0"]
    assert found(plan, "message") == {}
    assert notes(plan) == ""


def test_every_host_has_a_frame():
    assert list(found(case("columns to rows"), "host")) == ["host-0", "host-1"]


# --- how it looks -------------------------------------------------------------------------------


@pytest.mark.many(6)
def test_texts_do_not_overlap(plan):
    assert_legible(plan)


@settings(max_examples=15)
@given(transitions())
def test_every_transition_has_a_legible_picture(transition):
    src, dst, topology = transition
    plan = rv.plan(src, dst, topology=topology)
    assert ET.fromstring(svg(plan)).tag == "{http://www.w3.org/2000/svg}svg"
    assert_legible(plan)


def assert_legible(plan):
    """No text overlaps another or leaves the page, as matplotlib measures texts."""
    figure = figure_of(plan)
    figure.set_dpi(144)  # The resolution of a PNG; at a lower one, hinting widens texts.
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in drawn]
    for (a, box), (b, other) in combinations(boxes, 2):
        assert not box.padded(-0.5).overlaps(other.padded(-0.5)), (a, b)
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0, text
        assert box.y1 <= figure.bbox.y1, text


def cells(plan):
    """For every cell, by state and rank, its frame and the coloured boxes in it."""
    boxes = found(plan, "box")
    out = {}
    for name, cell in found(plan, "cell").items():
        _, index, rank = name.split("-")
        mine = [box for key, box in boxes.items() if key.startswith(f"box-{index}-{rank}-")]
        out[int(index), int(rank)] = cell, mine
    return out


@pytest.mark.parametrize("name", ["columns to rows", "reduce_scatter", "ragged transfer", "1-d"])
def test_colored_area_of_a_cell_is_the_share_that_the_rank_holds(name):
    plan = case(name)
    total = prod(plan.src.shape)
    for (index, rank), (cell, boxes) in cells(plan).items():
        area = sum(box.get_width() * box.get_height() for box in boxes)
        size = states(plan)[index].num_elements(rank)
        assert area == pytest.approx(cell.get_width() * cell.get_height() * size / total)


def test_boxes_lie_inside_their_cells(plan):
    for cell, boxes in cells(plan).values():
        for box in boxes:
            assert cell.get_bbox().padded(1e-6).containsx(box.get_x())
            assert cell.get_bbox().padded(1e-6).containsx(box.get_x() + box.get_width())
            assert cell.get_bbox().padded(1e-6).containsy(box.get_y())
            assert cell.get_bbox().padded(1e-6).containsy(box.get_y() + box.get_height())


def colors(boxes):
    return [to_hex(box.get_facecolor()).upper() for box in boxes]


def test_columns_to_rows_keeps_the_colors_of_the_columns():
    plan = case("columns to rows")
    drawn, last = cells(plan), len(plan.path.steps)
    columns = [color for rank in range(8) for color in colors(drawn[0, rank][1])]
    assert columns == list(PALETTE[:8])
    for rank in range(8):
        boxes = drawn[last, rank][1]
        assert colors(sorted(boxes, key=lambda box: box.get_x())) == columns


def test_partial_sums_are_hatched_and_numbered():
    plan = case("reduce_scatter")
    hatches = [box.get_hatch() for box in found(plan, "box-0").values()]
    assert all(hatches)
    assert not any(box.get_hatch() for box in found(plan, "box-1").values())
    labels = [text for text in texts(plan) if text.startswith("part")]
    assert labels == [f"part {p}" for p in (0, 1, 2, 3) * 2]


def test_arrow_with_more_bytes_is_wider():
    arrows = found(case("1-d"), "message")
    assert arrows["message-0-1-2"].get_linewidth() > arrows["message-0-0-1"].get_linewidth()


def test_arrow_color_depends_on_the_topology_level():
    arrows = found(case("columns to rows"), "message").values()
    drawn = [to_hex(arrow.get_edgecolor()).upper() for arrow in arrows]
    assert drawn == [LEVEL_COLORS[2]] * 8 + [LEVEL_COLORS[1]] * 24


# --- what is left out ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, said",
    [
        (lambda: case("3-d"), ["Cells show dims 0 and 1 of 3; cuts of dim 2 are not shown."]),
        (
            lambda: planned("R(1)V(1)D(1,1,4)", "R(1)V(1)D(1,4,1)", (3, 8, 8)),
            ["Cells show dims 1 and 2 of 3."],
        ),
        (
            lambda: planned("R(1)V(1)D(1,16)", "R(1)V(1)D(16,1)", (4096, 4096)),
            ["Merged: 240 messages"],
        ),
        (
            lambda: planned("R(1)V(1)D(128)", "R(128)V(1)D(1)", (4096,), MANY_HOSTS),
            ["Left out: 64 of 128 ranks", "128 pieces"],
        ),
    ],
    ids=["hidden dims", "dims that no step cuts", "more arrows than are drawn", "many ranks"],
)
def test_a_note_says_what_is_left_out(plan, said):
    made = plan()
    assert [words for words in said if words not in notes(made)] == []
    assert len(found(made, "rank")) <= MAX_RANKS
    assert bool(found(made, "bar")) == (len(pairs(made)) > MAX_ARROWS)
    assert_legible(made)


def test_note_of_a_small_picture_describes_only_the_scale():
    scale = "The width of an arrow shows its bytes, up to 4 MiB."
    assert notes(case("columns to rows")) == scale


# --- files --------------------------------------------------------------------------------------


def test_svg_does_not_depend_on_the_hash_seed():
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
    plan = case("1-d")
    draw(plan, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8") == svg(plan)


@pytest.mark.parametrize("name", ["sum on two levels", "scalar"])
def test_draw_writes_a_png_of_the_figure(tmp_path, name):
    plan = case(name)
    draw(plan, str(tmp_path / "plan.png"))
    data = (tmp_path / "plan.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    size = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    width, height = figure_of(plan).get_size_inches()
    assert size == pytest.approx((144 * width, 144 * height), abs=2)


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_missing_matplotlib_raises_picture_error(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(PictureError, match=r"pip install 'rvdcomm\[plot\]'\.$"):
        draw(case("1-d"), tmp_path / name)


def test_matplotlib_settings_of_the_user_do_not_change_the_svg():
    plan = case("1-d")
    expected = svg(plan)
    with matplotlib.rc_context({"svg.fonttype": "path", "lines.linewidth": 9, "font.size": 30}):
        assert svg(plan) == expected


def test_unsupported_suffix_raises_picture_error(tmp_path):
    with pytest.raises(PictureError, match=r"use a name in \.svg or \.png"):
        draw(case("1-d"), tmp_path / "plan.gif")
