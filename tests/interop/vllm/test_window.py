"""Windows: a view of a whole tensor, taken of any box that holds what it sees."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rvdcomm import Box, LayoutError
from rvdcomm.interop.vllm.window import Window


def window_of(view: Tensor, whole: Tensor) -> Window:
    return Window.of(whole.shape, view.shape, view.stride(), view.storage_offset())


def random_view(draw: random.Random, tensor: Tensor) -> Tensor:
    for _ in range(draw.randrange(4)):
        kind = draw.choice(["narrow", "chunk", "transpose", "split", "flatten", "step", "index"])
        d = draw.randrange(tensor.dim()) if tensor.dim() else 0
        if tensor.dim() == 0 or 0 in tensor.shape:
            return tensor
        size = tensor.shape[d]
        if kind == "narrow":
            start = draw.randrange(size)
            tensor = tensor.narrow(d, start, draw.randrange(1, size - start + 1))
        elif kind == "chunk":
            tensor = draw.choice(tensor.chunk(draw.randrange(1, 4), d))
        elif kind == "transpose":
            tensor = tensor.transpose(d, draw.randrange(tensor.dim()))
        elif kind == "split" and size % 2 == 0:
            tensor = tensor.unflatten(d, (2, size // 2))
        elif kind == "flatten" and d + 1 < tensor.dim():
            try:
                joined = (*tensor.shape[:d], -1, *tensor.shape[d + 2 :])
                tensor = tensor.view(joined)
            except RuntimeError:
                continue
        elif kind == "step":
            index = [slice(None)] * tensor.dim()
            index[d] = slice(None, None, 2)
            tensor = tensor[tuple(index)]
        elif kind == "index":
            tensor = tensor.select(d, draw.randrange(size))
    return tensor


def test_a_window_reads_the_view_of_any_box_that_holds_it() -> None:
    draw, refused = random.Random(0), 0
    for _ in range(3000):
        shape = [draw.randrange(1, 7) for _ in range(draw.randrange(1, 4))]
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        view = random_view(draw, whole)
        try:
            window = window_of(view, whole)
        except LayoutError:
            refused += 1
            continue
        box = Box(
            tuple(draw.randint(0, low) for low in window.box.lo),
            tuple(draw.randint(h, n) for h, n in zip(window.box.hi, shape, strict=True)),
        )
        held = whole[box.slices_within(Box.of_shape(shape))].clone()
        assert torch.equal(window.read(held, box), view)
        assert window.num_elements == view.numel()
    # Views that join dims of which they see a part; they are loaded whole.
    assert refused < 100


def test_the_box_is_the_least_one() -> None:
    whole = torch.arange(24).view(4, 6)
    assert window_of(whole[1:3, 2:4], whole).box == Box((1, 2), (3, 4))
    assert window_of(whole.t()[2], whole).box == Box((0, 2), (4, 3))
    assert window_of(whole.view(2, 2, 6)[:, 1], whole).box == Box((1, 0), (4, 6))


def test_an_expanded_view_repeats_what_it_sees() -> None:
    whole = torch.arange(6).view(2, 3)
    view = whole[:, :1].expand(2, 4)
    window = window_of(view, whole)
    assert window.box == Box((0, 0), (2, 1))
    assert torch.equal(window.read(whole[:, :1].clone(), window.box), view)


def test_an_empty_view_and_a_scalar_have_windows() -> None:
    assert window_of(torch.ones(3, 2)[:0], torch.ones(3, 2)).num_elements == 0
    scalar = torch.tensor(3.0)
    assert window_of(scalar, scalar).read(scalar.clone(), Box((), ())).item() == 3


def test_a_box_that_lacks_an_element_is_refused() -> None:
    whole = torch.arange(6).view(2, 3)
    with pytest.raises(LayoutError, match=r"the view sees \[0:2,0:3\], and \[0:1,0:3\] is held"):
        window_of(whole, whole).read(whole[:1], Box((0, 0), (1, 3)))
