"""Copy programs against numpy and torch: every dtype, any strides, any order of ops."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rvdcomm.layout import ITEM_BYTES
from tests.covering import each_value

_C = pytest.importorskip("rvdcomm._C", reason="the extension is not built")

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Casting complex values to real"),
]

SUMMABLE = [name for name in ITEM_BYTES if name != "float8_e8m0fnu"]
HALF = [name for name in SUMMABLE if name.startswith(("float8", "bfloat")) or name == "float16"]
FLOAT8 = [name for name in ITEM_BYTES if name.startswith("float8")]


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def side(buffer: int, tensor: torch.Tensor) -> tuple[int, str, int, tuple[int, ...]]:
    """The side of an op for this view; its buffer is the storage of the tensor."""
    name = str(tensor.dtype).removeprefix("torch.")
    return buffer, name, tensor.storage_offset(), tensor.stride()


def run(
    dst: torch.Tensor, srcs: Sequence[torch.Tensor], wide: bool = False, num_threads: int = 1
) -> None:
    """Run ``dst = sum(srcs)`` as a program of one op."""
    sides = [side(i + 1, src) for i, src in enumerate(srcs)]
    program = _C.CopyProgram([(tuple(dst.shape), side(0, dst), sides)], wide)
    addresses = [t.untyped_storage().data_ptr() for t in (dst, *srcs)]
    program.run(addresses, num_threads)


def random_tensor(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Values of moderate size that have no exact sums in half types."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(name)
    if name == "bool":
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).view(torch.bool)
    if "int" in name:
        raw = torch.randint(0, 256, (*shape, ITEM_BYTES[name]), generator=generator)
        return raw.to(torch.uint8).view(dtype).reshape(shape)
    real = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    if name == "float8_e8m0fnu":
        return real.abs().float().to(dtype)
    if dtype.is_complex:
        imaginary = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.complex(real, imaginary).to(dtype)
    return real.to(dtype)


def add_into(dst: torch.Tensor, src: torch.Tensor) -> None:
    """``dst += src`` as torch adds, rounded to the dtype; the oracle of every sum."""
    name = str(dst.dtype).removeprefix("torch.")
    if name.startswith("uint"):
        signed = torch_dtype(name[1:])
        dst.view(signed).add_(src.view(signed))
    elif name.startswith("float8") or name == "complex32":
        exact = torch.complex64 if name == "complex32" else torch.float32
        dst.copy_(dst.to(exact) + src.to(exact))
    else:
        dst.add_(src)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (x.flatten().clone().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


# --- moves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_a_strided_box_of_any_dtype_is_moved(name: str) -> None:
    src = random_tensor(name, (7, 10, 6), 1)
    dst = random_tensor(name, (5, 9, 11), 2)
    expected = dst.clone()
    box, origin = (slice(1, 5), slice(2, 9), slice(1, 6)), (slice(0, 4), slice(1, 8), slice(3, 8))
    expected[origin] = src[box]
    run(dst[origin], [src[box]])
    assert same_bits(dst, expected)


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_op_without_sources_fills_zeros(name: str) -> None:
    dst = random_tensor(name, (6, 10), 3)
    expected = dst.clone()
    expected[1:4, 2:9].view(torch.uint8).zero_()
    run(dst[1:4, 2:9], [])
    assert same_bits(dst, expected)


FORWARD, BACKWARD = slice(None), slice(None, None, -1)


@st.composite
def moves(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two views of one shape with their own permutations, steps and directions."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=5)))

    def view(fill: int) -> np.ndarray:
        order = draw(st.permutations(range(len(shape))))
        steps = [draw(st.integers(1, 3)) for _ in shape]
        margins = [draw(st.integers(0, 2)) for _ in shape]
        sizes = [n * step + margin for n, step, margin in zip(shape, steps, margins, strict=True)]
        base = np.arange(fill, fill + prod(sizes), dtype=np.uint32)
        base = base.reshape([sizes[d] for d in order]).transpose(np.argsort(order))
        index: list[Any] = [...]
        for n, step, margin in zip(shape, steps, margins, strict=True):
            index.append(slice(margin, margin + n * step, step))
        cut = base[tuple(index)]
        return cut[(..., *(slice(0, n) for n in shape))]

    dst, src = view(0), view(10**6)
    flips = st.tuples(st.just(...), *(st.sampled_from([FORWARD, BACKWARD]) for _ in shape))
    return dst[draw(flips)], src[draw(flips)]


def whole(array: np.ndarray) -> np.ndarray:
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def numpy_side(buffer: int, view: np.ndarray) -> tuple[int, str, int, list[int]]:
    name, item = view.dtype.name, view.itemsize
    start = view.__array_interface__["data"][0] - whole(view).__array_interface__["data"][0]
    return buffer, name, max(start, 0) // item, [stride // item for stride in view.strides]


def address(view: np.ndarray) -> int:
    return int(whole(view).__array_interface__["data"][0])


@settings(max_examples=300, deadline=None)
@given(moves(), st.sampled_from([1, 2, 5]))
def test_moves_agree_with_numpy(views: tuple[np.ndarray, np.ndarray], num_threads: int) -> None:
    dst, src = views
    expected = dst.copy()
    expected[...] = src
    outside = whole(dst).sum() - dst.sum()
    program = _C.CopyProgram([(dst.shape, numpy_side(0, dst), [numpy_side(1, src)])])
    program.run([address(dst), address(src)], num_threads)
    np.testing.assert_array_equal(dst, expected)
    assert whole(dst).sum() - dst.sum() == outside


def test_more_dims_than_the_native_core_supports_are_copied() -> None:
    src = torch.arange(3**11, dtype=torch.int32).reshape((3,) * 11)
    dst = torch.zeros((3,) * 11, dtype=torch.int32).permute(*range(10, -1, -1))
    run(dst, [src])
    assert torch.equal(dst, src)


@pytest.mark.parametrize(
    "shape, permutation, num_threads",
    [
        ((1031, 517), (0, 1), 7),
        ((1031, 517), (1, 0), 3),
        ((1031, 517), (1, 0), 2),
        ((64, 33, 129), (1, 0, 2), 2),
        ((64, 33, 129), (1, 0, 2), 7),
        ((1 << 20,), (0,), 1),
    ],
)
def test_large_moves_are_correct_with_any_number_of_threads(
    shape: tuple[int, ...], permutation: tuple[int, ...], num_threads: int
) -> None:
    src = random_tensor("float32", shape, 4).permute(permutation)
    dst = torch.full(src.shape, -1.0)
    run(dst, [src], num_threads=num_threads)
    assert torch.equal(dst, src)


def test_a_broadcast_source_repeats() -> None:
    src, dst = torch.arange(5), torch.zeros(4, 5, dtype=torch.int64)
    run(dst, [src.expand(4, 5)])
    assert torch.equal(dst, src.expand(4, 5))


# --- sums ---------------------------------------------------------------------------------------


@each_value(name=SUMMABLE, num_srcs=[2, 3, 5])
def test_sum_equals_additions_one_after_another(name: str, num_srcs: int) -> None:
    srcs = [random_tensor(name, (37, 41), seed) for seed in range(num_srcs)]
    expected = srcs[0].clone()
    for src in srcs[1:]:
        add_into(expected, src)
    dst = torch.zeros_like(srcs[0])
    run(dst, srcs)
    assert same_bits(dst, expected)


@pytest.mark.parametrize("name", HALF)
def test_a_wide_sum_rounds_once(name: str) -> None:
    srcs = [random_tensor(name, (37, 41), seed) for seed in range(4)]
    total = srcs[0].float()
    for src in srcs[1:]:
        total += src.float()
    dst = torch.zeros_like(srcs[0])
    run(dst, srcs, wide=True)
    assert same_bits(dst, total.to(torch_dtype(name)))


@pytest.mark.parametrize("name", SUMMABLE)
def test_dst_may_be_the_first_source_of_a_sum(name: str) -> None:
    dst, src = random_tensor(name, (9, 50), 1), random_tensor(name, (9, 50), 2)
    expected = dst.clone()
    add_into(expected, src)
    both = _C.CopyProgram(
        [((9, 50), (0, name, 0, (50, 1)), [(0, name, 0, (50, 1)), (1, name, 0, (50, 1))])]
    )
    both.run([dst.data_ptr(), src.data_ptr()])
    assert same_bits(dst, expected)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.data(),
    st.sampled_from(["float32", "bfloat16", "int8", "complex64"]),
    st.integers(1, 3),
)
def test_strided_sums_agree_with_torch(
    shape: list[int], data: st.DataObject, name: str, num_threads: int
) -> None:
    def view(seed: int) -> torch.Tensor:
        order = data.draw(st.permutations(range(len(shape))))
        inverse = sorted(range(len(shape)), key=lambda d: order[d])
        return random_tensor(name, [shape[d] for d in order], seed).permute(inverse)

    srcs, dst = [view(1), view(2), view(3)], view(4)
    expected = srcs[0].clone()
    for src in srcs[1:]:
        add_into(expected, src)
    run(dst, srcs, num_threads=num_threads)
    assert same_bits(dst, expected)


def test_large_sum_has_the_same_bits_with_one_and_four_threads() -> None:
    srcs = [random_tensor("bfloat16", (1000, 777), seed) for seed in range(3)]
    once, shared = torch.zeros_like(srcs[0]), torch.zeros_like(srcs[0])
    run(once, srcs)
    run(shared, srcs, num_threads=4)
    assert same_bits(once, shared)


# --- conversions --------------------------------------------------------------------------------


def all_patterns(name: str) -> torch.Tensor:
    if ITEM_BYTES[name] == 1:
        return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch_dtype(name))
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch_dtype(name))


def assert_same_or_both_nan(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    ours_nan, theirs_nan = ours.float().isnan(), theirs.float().isnan()
    assert torch.equal(ours_nan, theirs_nan)
    item = torch.uint8 if ours.element_size() == 1 else torch.int16
    item = torch.int32 if ours.element_size() == 4 else item
    assert torch.equal(ours.view(item)[~ours_nan], theirs.view(item)[~theirs_nan])


@pytest.mark.parametrize("name", ["float16", "bfloat16", *FLOAT8])
def test_every_small_float_converts_to_float32_as_in_torch(name: str) -> None:
    src = all_patterns(name)
    dst = torch.zeros(src.shape)
    run(dst, [src])
    assert_same_or_both_nan(dst, src.float())


@pytest.mark.parametrize("dst_name", ["float16", "bfloat16", *FLOAT8])
def test_float32_rounds_to_small_floats_as_in_torch(dst_name: str) -> None:
    """All upper halves of a float32, with lower halves around every tie."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    src = (high | low[:, None]).flatten().to(torch.uint32).view(torch.float32)
    dst = torch.zeros(src.shape, dtype=torch_dtype(dst_name))
    run(dst, [src])
    theirs = src.to(torch_dtype(dst_name))
    if dst_name == "float8_e4m3fn":
        # Our conversion saturates; torch before 2.13 gives NaN for values that are too large.
        is_lost = theirs.float().isnan() & ~src.isnan()
        largest = torch.finfo(theirs.dtype).max
        theirs = torch.where(is_lost, src.sign() * largest, theirs.float()).to(theirs.dtype)
    assert_same_or_both_nan(dst, theirs)


@pytest.mark.parametrize("src_name", ITEM_BYTES)
def test_every_dtype_converts_to_every_other(src_name: str) -> None:
    """Small whole numbers: exact in most dtypes, and defined by torch in all of them."""
    values = torch.tensor([1, 2, 4, 8, 16, 64, 1, 1, 32, 2, 8, 4], dtype=torch.float32)
    src = values.to(torch_dtype(src_name))
    dsts = {name: torch.zeros(12, dtype=torch_dtype(name)) for name in ITEM_BYTES}
    for dst in dsts.values():
        run(dst, [src])
    assert [name for name in dsts if not same_bits(dsts[name], src.to(dsts[name].dtype))] == []


@each_value(
    dst_name=["uint8", "int8", "bool", "int16", "int32", "int64", "uint8"],
    src_name=["float32", "float64", "int64", "int32", "uint8", "int8", "int64"],
)
def test_conversions_to_integers_equal_those_of_torch(dst_name: str, src_name: str) -> None:
    src = torch.tensor([-100, -3, -1, 0, 1, 2, 77, 100]).to(torch_dtype(src_name))
    if src.is_floating_point():
        src = src / 7
    if src_name.startswith("float") and dst_name == "uint8":
        src = src.abs()
    dst = torch.zeros(8, dtype=torch_dtype(dst_name))
    run(dst, [src])
    assert torch.equal(dst, src.to(torch_dtype(dst_name)))


def test_sum_is_converted_to_the_dtype_of_dst() -> None:
    srcs = [random_tensor("bfloat16", (33, 65), seed) for seed in range(3)]
    dst = torch.zeros(65, 33).t()
    run(dst, srcs, wide=True)
    assert torch.equal(dst, srcs[0].float() + srcs[1].float() + srcs[2].float())


def test_strided_conversion_to_a_wider_strided_dst_is_correct() -> None:
    src = random_tensor("float32", (40, 30), 1)[::2, ::3]
    dst = torch.zeros(40, 40, dtype=torch.float64)[::2, ::4]
    run(dst, [src])
    assert torch.equal(dst, src.double())


# --- programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_later_op_reads_what_an_earlier_one_wrote(num_threads: int) -> None:
    count = 1 << 20
    flat = (count,), (1, "int32", 0, (1,))
    program = _C.CopyProgram(
        [
            (flat[0], flat[1], [(0, "int32", 0, (1,))]),
            (flat[0], (2, "int32", 0, (1,)), [(1, "int32", 0, (1,)), (0, "int32", 0, (1,))]),
            (flat[0], flat[1], [(2, "int32", count - 1, (-1,))]),
        ]
    )
    a, b, c = (torch.randint(0, 99, (count,), dtype=torch.int32) for _ in range(3))
    program.run([a.data_ptr(), b.data_ptr(), c.data_ptr()], num_threads)
    assert torch.equal(c, 2 * a)
    assert torch.equal(b, c.flip(0))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_programs_agree_with_ops_one_after_another(data: st.DataObject, num_threads: int) -> None:
    """Random boxes of one array, so that ops overlap, follow each other, or form progressions."""
    ours = np.arange(2 * 40 * 50, dtype=np.int64).reshape(2, 40, 50)
    theirs = ours.copy()
    ops = []
    for _ in range(data.draw(st.integers(1, 8))):
        rows, cols = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
        boxes = []
        for plane in (0, 1):
            r, c = data.draw(st.integers(0, 40 - rows)), data.draw(st.integers(0, 50 - cols))
            boxes.append((plane, slice(r, r + rows), slice(c, c + cols)))
        dst, src = boxes[:: data.draw(st.sampled_from([1, -1]))]
        sides = [
            (0, "int64", plane * 2000 + r.start * 50 + c.start, (50, 1)) for plane, r, c in boxes
        ]
        dst_side, src_side = sides[dst[0]], sides[src[0]]
        if data.draw(st.booleans()):
            theirs[dst] += theirs[src]
            ops.append(((rows, cols), dst_side, [dst_side, src_side]))
        else:
            theirs[dst] = theirs[src]
            ops.append(((rows, cols), dst_side, [src_side]))
    _C.CopyProgram(ops).run([ours.ctypes.data], num_threads)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("num_peers", [2, 3, 5])
def test_ops_that_pack_columns_for_several_peers_are_correct(num_peers: int) -> None:
    src = torch.arange(60 * 60, dtype=torch.float32).reshape(60, 60)
    dst = torch.zeros(60 * 60)
    width = 60 // num_peers
    ops = [
        (
            (60, width),
            (1, "float32", peer * 60 * width, (width, 1)),
            [(0, "float32", peer * width, (60, 1))],
        )
        for peer in range(num_peers)
    ]
    _C.CopyProgram(ops).run([src.data_ptr(), dst.data_ptr()])
    assert torch.equal(
        dst, torch.cat([part.contiguous().view(-1) for part in src.chunk(num_peers, 1)])
    )


def test_copies_at_offsets_beyond_four_gibibytes_are_correct() -> None:
    """The memory is mapped sparsely: only pages that are touched exist."""
    num_bytes = 20 << 30
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    with mmap.mmap(-1, num_bytes, flags=flags) as memory:
        sparse = np.frombuffer(memory, dtype=np.int32)
        start, step = (1 << 31) + 5, 1 << 30
        sparse[[start, start + step]] = [11, 22]
        dst = np.zeros(2, dtype=np.int32)
        program = _C.CopyProgram(
            [
                ((2,), (1, "int32", 0, (1,)), [(0, "int32", start, (step,))]),
                ((2,), (0, "int32", start + 7, (step,)), [(1, "int32", 0, (1,))]),
            ]
        )
        program.run([sparse.ctypes.data, dst.ctypes.data])
        assert dst.tolist() == [11, 22]
        assert sparse[[start + 7, start + step + 7]].tolist() == [11, 22]
        del sparse


def test_num_bytes_counts_more_than_two_to_the_31_elements() -> None:
    """Its size is only reached by repeating one source row: nothing large is read or written."""
    program = _C.CopyProgram(
        [((1 << 22, 1 << 10), (1, "uint8", 0, (1 << 10, 1)), [(0, "uint8", 0, (0, 1))])]
    )
    assert program.num_bytes == 1 << 32


FORK = """
import os, numpy, sys
from rvdcomm import _C
src = numpy.arange(1 << 20)
dst = numpy.zeros_like(src)
program = _C.CopyProgram([((1 << 20,), (0, "int64", 0, (1,)), [(1, "int64", 0, (1,))])])
addresses = [dst.ctypes.data, src.ctypes.data]
program.run(addresses, 2)
child = os.fork()
dst[:] = 0
program.run(addresses, 2)
assert (dst == src).all()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_makes_its_own_threads() -> None:
    """Runs in a new process, because threads of torch do not survive a fork."""
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


# --- errors -------------------------------------------------------------------------------------

ROW = (0, "float32", 0, (1,))


@pytest.mark.parametrize(
    "op, message",
    [
        (
            ((4,), (0, "float31", 0, (1,)), []),
            "dtype 'float31' is unknown; the known ones are bool",
        ),
        (((4,), (0, "int8", 0, (1, 2)), []), "2 strides for 1 dims; give one a dim"),
        (((-4,), ROW, []), "dim 0 has size -4"),
        (((4,), (0, "int8", 0, (0,)), []), "dst has stride 0 in dim 0 of size 4"),
        (((4,), (-1, "int8", 0, (1,)), []), "buffer -1; buffers count from 0"),
        (((4,), (0, "int8", 2, (-1,)), []), "reaches below its buffer's start"),
        (((1 << 40,), (0, "int64", 0, (1 << 40,)), []), "reaches beyond 2\\^62 bytes"),
        (((4,), ROW, [ROW, (1, "int8", 0, (1,))]), "sums float32 and int8"),
        (
            ((4,), ROW, [(1, "float8_e8m0fnu", 0, (1,))] * 2),
            "float8_e8m0fnu values cannot be summed",
        ),
    ],
)
def test_invalid_ops_raise_value_error_with_the_reason(op: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.CopyProgram([op])


def test_too_few_addresses_raise_value_error() -> None:
    program = _C.CopyProgram([((4,), ROW, [(2, "float32", 0, (1,))])])
    with pytest.raises(ValueError, match="uses buffers 0 to 2, but 2 addresses were given"):
        program.run([0, 0])


def test_zero_threads_raise_value_error() -> None:
    with pytest.raises(ValueError, match="num_threads is 0; give 1 or more"):
        _C.CopyProgram([]).run([], 0)


@pytest.mark.skipif(_C.has_cuda, reason="built with CUDA")
def test_run_cuda_raises_runtime_error_if_built_without_cuda() -> None:
    with pytest.raises(RuntimeError, match="built without CUDA"):
        _C.CopyProgram([]).run_cuda([], 0)


# --- CUDA ---------------------------------------------------------------------------------------

on_gpu = pytest.mark.skipif(
    not (_C.has_cuda and torch.cuda.is_available()), reason="needs a GPU and a build with CUDA"
)


@pytest.mark.skipif(not _C.has_cuda or torch.cuda.is_available(), reason="is about having no GPU")
def test_run_cuda_with_no_gpu_raises_error_that_names_the_cuda_call() -> None:
    program = _C.CopyProgram([((4,), ROW, [])])
    with pytest.raises(RuntimeError, match=r"copy_cuda.cpp:\d+: cudaGetDevice\(&device\): "):
        program.run_cuda([0], 0)


@on_gpu
@each_value(name=SUMMABLE, num_srcs=[0, 1, 3])
def test_gpu_result_has_the_bits_of_the_cpu_result(name: str, num_srcs: int) -> None:
    for box in ((slice(1, 60), slice(3, 70)), (slice(0, 64), slice(16, 80))):
        srcs = [random_tensor(name, (64, 96), seed) for seed in range(num_srcs)]
        dst = random_tensor(name, (64, 96), 9)
        tensors = [dst, *srcs]
        sides = [side(i, tensor[box]) for i, tensor in enumerate(tensors)]
        program = _C.CopyProgram([(tuple(dst[box].shape), sides[0], sides[1:])])
        on_device = [tensor.cuda() for tensor in tensors]
        program.run([tensor.data_ptr() for tensor in tensors])
        stream = torch.cuda.current_stream().cuda_stream
        program.run_cuda([tensor.data_ptr() for tensor in on_device], stream)
        assert same_bits(on_device[0].cpu(), dst)


@on_gpu
@pytest.mark.parametrize("num_rows", [20, 300, 4000])
def test_first_run_waits_for_its_table_if_the_copy_engine_is_busy(num_rows: int) -> None:
    """The table is uploaded in the first run; nothing else orders it before a kernel of a stream
    of its own. A large copy on another stream delays the upload.
    """
    side_stream, busy = torch.cuda.Stream(), torch.cuda.Stream()
    large = torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    room, src = torch.empty_like(large, device="cuda"), torch.randn(num_rows, 8).cuda()
    wrong = []
    for turn in range(10):
        rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(turn)).tolist()
        program = _C.CopyProgram([
            ((8,), (0, "float32", 8 * to, (1,)), [(1, "float32", 8 * row, (1,))])
            for to, row in enumerate(rows)
        ])  # fmt: skip
        dst = torch.zeros_like(src)
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            room.copy_(large, non_blocking=True)
        program.run_cuda([dst.data_ptr(), src.data_ptr()], side_stream.cuda_stream)
        torch.cuda.synchronize()
        if not torch.equal(dst, src[rows]):
            wrong.append(turn)
    assert wrong == []


@on_gpu
def test_more_buffers_than_a_launch_takes_run_in_several_launches() -> None:
    rows = torch.arange(600 * 8, dtype=torch.int32).view(600, 8).cuda()
    ops = [((8,), (i, "int32", 0, (1,)), [(599 - i, "int32", 0, (1,))]) for i in range(300)]
    expected = torch.cat([rows[300:].flip(0), rows[300:]])
    stream = torch.cuda.current_stream().cuda_stream
    _C.CopyProgram(ops).run_cuda([row.data_ptr() for row in rows], stream)
    assert torch.equal(rows, expected)


@on_gpu
def test_batch_of_many_ops_on_the_gpu_equals_the_cpu_result() -> None:
    """More ops than a launch takes by value, so that they come from a table on the device."""
    src, dst = torch.randn(200, 40).cuda(), torch.zeros(200, 40).cuda()
    ops = []
    for row in range(200):
        start, count = row % 7, 40 - row % 11 - row % 7
        one = ((count,), (0, "float32", 40 * row + start, (1,)))
        ops.append((*one, [(1, "float32", 40 * ((7 * row) % 200) + start, (1,))]))
    expected = torch.zeros(200, 40)
    on_host = src.cpu()
    _C.CopyProgram(ops).run([expected.data_ptr(), on_host.data_ptr()])
    program = _C.CopyProgram(ops)
    program.run_cuda([dst.data_ptr(), src.data_ptr()], torch.cuda.current_stream().cuda_stream)
    assert torch.equal(dst.cpu(), expected)
