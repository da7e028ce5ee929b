"""Sliding windows: text form, elements that runs of iterations read, and ops of a run."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from superscaler_core import ops
from superscaler_core.errors import AnnotationError
from superscaler_core.graph.sliding import SlidingWindow

WINDOWS = st.builds(
    SlidingWindow, st.just("y"), st.integers(1, 4), st.integers(-5, 0), st.integers(0, 5)
)


@st.composite
def slid(draw):
    """A window, its number of iterations, the size of the dim, and runs of the iterations."""
    window, of = draw(WINDOWS), draw(st.integers(1, 8))
    most = of * window.stride + window.last
    least = max(1, (of - 1) * window.stride + window.first + 1)
    size = draw(st.integers(least, most))
    cuts = sorted({0, of, *draw(st.lists(st.integers(0, of), max_size=4))})
    return window, of, size, list(pairwise(cuts))


@given(WINDOWS)
def test_parse_undoes_str(window):
    assert SlidingWindow.parse(str(window)) == window


@pytest.mark.parametrize("text", ["y-1+1", "y*2-1+1", "y-0+2", "y*3", "y*2-0+1", "y-0+0"])
def test_text_is_canonical(text):
    assert str(SlidingWindow.parse(text)) == text


@given(slid())
def test_run_of_iterations_reads_all_elements_in_its_windows(case):
    window, of, size, runs = case
    for start, stop in runs:
        lo, hi = window.reads(start, stop, of=of, size=size)
        met = {
            index
            for y in range(start, stop)
            for index in range(
                y * window.stride + window.first, y * window.stride + window.last + 1
            )
        }
        inside = {index for index in met if 0 <= index < size}
        assert inside
        assert inside <= set(range(lo, hi))
        before, after = window.overhang(start, stop, size=size)
        assert (before, after) == (max(0, -min(met)), max(0, max(met) + 1 - size))


@given(slid())
def test_tiling_runs_cover_the_dim_and_share_the_window_overlap(case):
    window, of, size, runs = case
    bounds = [window.reads(start, stop, of=of, size=size) for start, stop in runs]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    for (_, hi), (lo, _) in pairwise(bounds):
        # The overlap is smaller where the windows of a run reach past the end of the dim.
        assert 0 <= hi - lo <= window.overlap
        assert hi - lo == window.overlap or lo == 0 or hi == size


@given(slid(), st.integers(1, 3))
def test_convolution_split_into_runs_equals_the_whole(case, dilation):
    window, of, size, runs = case
    taps = (window.last - window.first) // dilation + 1
    last = window.first + (taps - 1) * dilation
    if last < 0 or not SlidingWindow("y", window.stride, window.first, last).fits(of, size):
        return
    window = SlidingWindow("y", window.stride, window.first, last)
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(2, 3, size, dtype=torch.float64, generator=generator)
    weight = torch.randn(4, 3, taps, dtype=torch.float64, generator=generator)
    behind = max(0, (of - 1) * window.stride + last + 1 - size)
    whole = F.conv1d(F.pad(x, (-window.first, behind)), weight, None, window.stride, 0, dilation)
    made = []
    for start, stop in runs:
        lo, hi = window.reads(start, stop, of=of, size=size)
        overhang = [window.overhang(start, stop, size=size)]
        piece = x[:, :, lo:hi]
        made.append(ops.conv(piece, weight, overhang, stride=[window.stride], dilation=[dilation]))
        assert made[-1].shape[2] == stop - start
    torch.testing.assert_close(torch.cat(made, 2), whole, rtol=1e-12, atol=1e-12)


@given(slid(), st.booleans())
def test_pooling_split_into_runs_equals_the_whole(case, counts):
    window, of, size, runs = case
    reach = window.last - window.first + 1
    x = torch.randn(2, 3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(of))
    at = [range(y * window.stride + window.first, y * window.stride + window.last + 1)
          for y in range(of)]  # fmt: skip
    inside = [[i for i in indices if 0 <= i < size] for indices in at]
    largest = torch.stack([x[:, :, i].amax(2) for i in inside], 2)
    mean = torch.stack([x[:, :, i].sum(2) / (reach if counts else len(i)) for i in inside], 2)
    pooled, averaged = [], []
    for start, stop in runs:
        lo, hi = window.reads(start, stop, of=of, size=size)
        overhang = [window.overhang(start, stop, size=size)]
        piece, stride = x[:, :, lo:hi], [window.stride]
        pooled.append(ops.max_pool(piece, [reach], overhang, stride=stride, dilation=[1]))
        averaged.append(
            ops.avg_pool(piece, [reach], overhang, stride=stride, counts_padding=counts)
        )
    torch.testing.assert_close(torch.cat(pooled, 2), largest, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(averaged, 2), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("text", ["y", "y*2-1", "y+1-1", "y-1-1", "2*y", "y*2*2"])
def test_malformed_window_text_is_rejected(text):
    with pytest.raises(AnnotationError, match="is no sliding window; one is"):
        SlidingWindow.parse(text)


@pytest.mark.parametrize("numbers", [(0, 0, 0), (1, 1, 2), (1, -2, -1)])
def test_window_with_zero_stride_or_without_its_own_index_is_rejected(numbers):
    with pytest.raises(AnnotationError, match="the stride is at least 1, and iteration i reads"):
        SlidingWindow("y", *numbers)
