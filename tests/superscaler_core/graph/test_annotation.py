"""Annotations: text form, sizes, and boxes that tile."""

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superscaler_core.errors import AnnotationError
from superscaler_core.graph.annotation import Annotation, tiling_loops

TEXTS = [
    "m k+, k+ n -> m n",
    "b s (h d) -> b s h d",
    "b h l e^, b h t^ e^, b h t^ d -> b h l d",
    "b+ s+ -> ()",
    "() -> ()",
    "1 h -> b h",
    "g s^ e^ -> g s^ e^ c^, g",
    "n (g c+) x^, (g o) c+ k^ -> n (g o) y^",
    "n c+ y0*2-1+1 y1-0+2, o c+ k0^ k1^ -> n o y0 y1",
    "b y*3 -> b y",
]


@st.composite
def annotations(draw):
    """Two inputs and one output of loops that are free, fixed or summed."""
    loops = list("abcdef")[: draw(st.integers(1, 6))]
    kinds = [draw(st.sampled_from(["free", "fixed", "sum"])) for _ in loops]
    used = [i for i, kind in zip(loops, kinds, strict=True)]
    out = [i for i, kind in zip(loops, kinds, strict=True) if kind != "sum"]
    fixed = frozenset(i for i, kind in zip(loops, kinds, strict=True) if kind == "fixed")
    operands = []
    for held in (used, draw(st.lists(st.sampled_from(used), unique=True)), out):
        dims, left = [], list(draw(st.permutations(held)))
        while left:
            size = draw(st.integers(1, len(left)))
            dims.append(tuple(left[:size]))
            left = left[size:]
        dims += [()] * draw(st.integers(0, 1))
        operands.append(tuple(dims))
    return Annotation(tuple(operands[:2]), (operands[2],), fixed)


@given(annotations())
def test_parse_undoes_str(annotation):
    assert Annotation.parse(str(annotation)) == annotation


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_canonical(text):
    assert str(Annotation.parse(text)) == text


def test_reduction_mark_applies_to_all_uses_of_a_loop():
    assert str(Annotation.parse("m k+, k n -> m n")) == "m k+, k+ n -> m n"


@given(annotations(), st.data())
def test_known_sizes_that_agree_with_the_shapes_are_accepted(annotation, data):
    sizes = {i: data.draw(st.integers(1, 4)) for i in annotation.ids}
    shapes = [tuple(prod(sizes[i] for i in dim) for dim in o) for o in annotation.operands]
    found = annotation.sizes(shapes[:2], shapes[2:], known=sizes)
    assert found == sizes


@given(annotations(), st.data())
def test_sizes_of_loops_that_are_whole_dims_follow_from_the_shapes(annotation, data):
    sizes = {i: data.draw(st.integers(1, 4)) for i in annotation.ids}
    whole = {dim[0] for operand in annotation.operands for dim in operand if len(dim) == 1}
    shapes = [tuple(prod(sizes[i] for i in dim) for dim in o) for o in annotation.operands]
    known = {i: size for i, size in sizes.items() if i not in whole}
    assert annotation.sizes(shapes[:2], shapes[2:], known=known) == sizes


@given(annotations(), st.data())
def test_boxes_of_tiling_ranges_tile_every_operand(annotation, data):
    sizes = {i: data.draw(st.integers(1, 4)) for i in annotation.ids}
    loops = [i for i in annotation.ids if annotation.is_splittable(i, sizes)]
    cuts = {i: sorted({0, sizes[i], data.draw(st.integers(0, sizes[i]))}) for i in loops}
    pieces = [[(i, a, b) for a, b in pairwise(c)] for i, c in cuts.items()]
    for operand in annotation.operands:
        shape = tuple(prod(sizes[i] for i in dim) for dim in operand)
        held = {i for dim in operand for i in dim}
        count = np.zeros(shape, dtype=int)
        for combination in product(*pieces):
            box = annotation.box(operand, {i: (a, b) for i, a, b in combination}, sizes)
            count[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))] += 1
        # Every loop that the operand lacks repeats its boxes.
        repeats = prod(len(cuts[i]) - 1 for i in loops if i not in held)
        assert (count == repeats).all()


def test_composed_dim_is_split_along_its_outer_loop_only():
    annotation = Annotation.parse("b (h d) -> b h d")
    sizes = annotation.sizes([(2, 12)], [(2, 3, 4)])
    assert [i for i in annotation.ids if annotation.is_splittable(i, sizes)] == ["b", "h"]
    assert str(annotation.box(annotation.inputs[0], {"h": (1, 2)}, sizes)) == "[0:2,4:8]"
    with pytest.raises(AnnotationError, match=r"\(h d\) cannot be cut along its inner d to \[0, 2"):
        annotation.box(annotation.inputs[0], {"d": (0, 2)}, sizes)


IMAGES = Annotation.parse("n c+ y0*2-1+1 y1*2-0+1, o c+ k^ l^ -> n o y0 y1")
IMAGE_SHAPES = [(2, 3, 9, 8), (5, 3, 3, 2)], [(2, 5, 5, 4)]


def test_window_box_includes_its_halo_inside_the_tensor():
    sizes = IMAGES.sizes(*IMAGE_SHAPES)
    image, shape = IMAGES.inputs[0], IMAGE_SHAPES[0][0]
    boxes = [
        IMAGES.box(image, {"y0": rows, "y1": columns, "c": (1, 3)}, sizes, shape)
        for rows, columns in [((0, 2), (0, 1)), ((2, 5), (1, 4))]
    ]
    assert list(map(str, boxes)) == ["[0:2,1:3,0:4,0:2]", "[0:2,1:3,3:9,2:8]"]
    assert str(IMAGES.box(image, {}, sizes, shape)) == "[0:2,0:3,0:9,0:8]"
    pads = IMAGES.overhang(image, {"y0": (0, 2)}, sizes, shape)
    assert pads == ((0, 0), (0, 0), (1, 0), (0, 0))


def test_loops_of_overlapping_windows_do_not_tile_their_input():
    assert tiling_loops(IMAGES.inputs[0]) == {"n", "c", "y1"}
    assert tiling_loops(IMAGES.outputs[0]) == {"n", "o", "y0", "y1"}


def test_window_loops_are_splittable_and_have_the_size_of_the_output():
    sizes = IMAGES.sizes(*IMAGE_SHAPES)
    assert sizes == {"n": 2, "c": 3, "o": 5, "k": 3, "l": 2, "y0": 5, "y1": 4}
    loops = [i for i in IMAGES.ids if IMAGES.is_splittable(i, sizes)]
    assert sorted(loops) == ["c", "n", "o", "y0", "y1"]
    assert IMAGES.reductions == ("c",)


@pytest.mark.parametrize("height", [8, 12])
def test_windows_that_do_not_fit_a_dim_raise_annotation_error(height):
    shapes = [(2, 3, height, 8), (5, 3, 3, 2)], [(2, 5, 5, 4)]
    if height == 8:  # the fifth window begins at row 7
        assert IMAGES.sizes(*shapes)["y0"] == 5
        shapes = [(2, 3, 7, 8), (5, 3, 3, 2)], [(2, 5, 5, 4)]
    with pytest.raises(AnnotationError, match=r"5 windows y0\*2-1\+1 do not fit a dim of size"):
        IMAGES.sizes(*shapes)


@pytest.mark.parametrize("text", ["y-1+1 -> y^", "y-1+1, y -> ()", "y -> y-1+1", "y-1+1 -> y, ()"])
def test_window_without_a_splittable_loop_in_all_outputs_is_rejected(text):
    with pytest.raises(AnnotationError, match=r"the window y-1\+1 has to be of an input"):
        Annotation.parse(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("(y-1+1 d) -> y d", r"the window y-1\+1 is a dim of its own, outside of '\( \)'"),
        ("y-1 -> y", "unexpected '-' at column 2"),
        ("m k, k n -> m n", r"some output lacks k; write 'k\+' if parts of it add up, 'k\^'"),
        ("m+ k -> m k", r"'m\+' marks a sum over m, but every output has it"),
        ("m k+^ -> m", "unexpected|both|marked"),
        ("m k", "expected one '->'"),
        ("m -> k -> n", "expected one '->'"),
        ("m (k -> m", r"'\(' is not closed"),
        ("m k) -> m", r"'\)' without '\('"),
        ("m ? -> m", r"unexpected '\?' at column 3"),
    ],
)
def test_malformed_annotation_text_raises_annotation_error(text, message):
    with pytest.raises(AnnotationError, match=message):
        Annotation.parse(text)


@pytest.mark.parametrize(
    "inputs, outputs, message",
    [
        ([(2, 3), (4, 5)], [(2, 5)], r"a dim of size 4 should be k=3"),
        ([(2, 3)], [(2, 5)], "2 inputs and 1 outputs, but 1 and 1 were given"),
        ([(2, 3), (3,)], [(2, 5)], r"'k\+ n' has 2 dims, its tensor has shape \(3,\)"),
    ],
)
def test_shapes_that_do_not_fit_raise_annotation_error(inputs, outputs, message):
    with pytest.raises(AnnotationError, match=message):
        Annotation.parse("m k+, k+ n -> m n").sizes(inputs, outputs)


def test_undetermined_sizes_raise_annotation_error_naming_the_loops():
    annotation = Annotation.parse("(g c) -> (g c)")
    with pytest.raises(AnnotationError, match="do not say how large g, c is"):
        annotation.sizes([(6,)], [(6,)])
    assert annotation.sizes([(6,)], [(6,)], known={"g": 2}) == {"g": 2, "c": 3}
