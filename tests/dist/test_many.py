"""redistribute_many on processes: the data, what it accepts, and errors on every rank."""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm.run.world import World
from tests.dist.shards import error_of, faults_of, shard_of
from tests.dist.world import Worlds
from tests.oracle import random_layout, random_shape

pytestmark = pytest.mark.dist

EXECUTORS = ("dist", "peer")
Pairs = dict[str, tuple[rv.Layout, rv.Layout]]


def random_pairs(seed: int, num_ranks: int) -> Pairs:
    """Tensors of some kinds, over the same, other and overlapping ranks."""
    rng = random.Random(seed)
    everyone = rv.Layout((6,), f"R({num_ranks})V(1)D(1)")
    found: Pairs = {"all": (everyone, everyone)}
    for kind in range(5):
        shape = rng.choice([random_shape(rng), (12, 24), (24,), ()])
        sizes = [rng.choice([1, 2, 3, num_ranks]) for _ in range(2)]
        src, dst = (random_layout(rng, shape, rng.sample(range(num_ranks), size)) for size in sizes)
        found |= {f"{kind}.{i}": (src, dst) for i in range(rng.randint(1, 4))}
    return found


def sides(pairs: Pairs) -> tuple[dict[str, rv.Layout], dict[str, rv.Layout]]:
    return {n: src for n, (src, _) in pairs.items()}, {n: dst for n, (_, dst) in pairs.items()}


def shards(rank: int, pairs: Pairs, dtype: str = "float32") -> dict[str, Tensor | None]:
    return {name: shard_of(rank, src, len(name), dtype) for name, (src, _) in pairs.items()}


def twice(rank: int, pairs: Pairs, executor: str, limit: int | None) -> list[dict[str, Any]]:
    """Two calls; in the second tensors and results are strided."""
    src, dst = sides(pairs)
    mine = shards(rank, pairs)
    options: dict[str, Any] = {"executor": executor, "memory_limit": limit}
    first = rv.redistribute_many(mine, src, dst, **options)
    strided = {n: None if t is None else _every_other(t) for n, t in mine.items()}
    outs = {n: _every_other(torch.zeros_like(t)) for n, t in first.items() if t is not None}
    second = rv.redistribute_many(strided, src, dst, out=outs, **options)
    assert all(second[name] is out for name, out in outs.items())
    return [{n: None if t is None else t.numpy() for n, t in r.items()} for r in (first, second)]


def _every_other(tensor: Tensor) -> Tensor:
    """The same values, in every other element of memory."""
    return torch.stack([tensor, torch.full_like(tensor, 7)], -1)[..., 0]


@pytest.mark.parametrize(
    "executor, limit, seed",
    [("dist", None, 0), ("peer", 20 << 10, 1), ("dist", 20 << 10, 2), ("peer", None, 3)],
)
def test_every_tensor_is_redistributed_correctly(
    worlds: Worlds, executor: str, limit: int | None, seed: int
) -> None:
    pairs = random_pairs(seed, 6)
    seen = worlds(6).run(twice, pairs, executor, limit)
    for call in range(2):
        for name, (src, dst) in pairs.items():
            results = [found[call][name] for found in seen]
            assert faults_of(results, src, dst, seed=len(name)) == [], f"{name}, call {call}"


# --- sources and targets that are parts of other tensors ----------------------------------------


def fused(rank: int, executor: str) -> str:
    """A trainer's fused QKV, gate-up and transposed weights become an engine's."""
    tp, hidden, heads, size = 2, 8, 4, 6
    whole = {n: torch.randn(heads * size, hidden, generator=_seed(n)) for n in "qkvgu"}
    mine = {n: t.chunk(tp)[rank % tp] for n, t in whole.items()}
    qkv = torch.cat([mine["q"], mine["k"], mine["v"]])
    # Megatron's: the heads' q, k and v one after another.
    interleaved = torch.stack([mine[n].view(-1, size, hidden) for n in "qkv"], 1)
    gate_up = torch.cat([mine["g"], mine["u"]]).t().contiguous()
    rows = len(mine["q"])
    tensors = {
        **{n: qkv[i * rows : (i + 1) * rows] for i, n in enumerate("qkv")},
        **{f"{n}.heads": interleaved[:, i] for i, n in enumerate("qkv")},
        "g": gate_up.t()[:rows],
        "u": gate_up.t()[rows:],
    }
    flat = rv.Layout((heads * size, hidden), "R(1)V(1)D(2,1)", (0, 1))
    headed = rv.Layout((heads, size, hidden), "R(1)V(1)D(2,1,1)", (0, 1))
    src = {n: headed if "heads" in n else flat for n in tensors}
    engine = (2, 3)
    dst = {n: rv.Layout(x.shape, str(x.rvd), engine) for n, x in src.items()}
    result = torch.zeros(5, heads * size // tp, hidden)
    out = {n: result[i] for i, n in enumerate("qkvgu")} if rank in engine else {}
    moved = rv.redistribute_many(tensors if rank < 2 else {}, src, dst, out=out, executor=executor)
    if rank in engine:
        assert torch.equal(result, torch.stack([mine[n] for n in "qkvgu"]))
        for n in "qkv":
            assert torch.equal(moved[f"{n}.heads"].flatten(0, 1), mine[n])
    return "ok"


def _seed(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(ord(name))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_sources_may_be_views_of_fused_and_transposed_tensors(
    worlds: Worlds, executor: str
) -> None:
    assert worlds(4).run(fused, executor) == ["ok"] * 4


def renamed(rank: int) -> str:
    src = {"layers.0.w": rv.Layout((8,), "R(1)V(1)D(2)", (0, 1))}
    dst = {"model.0.w": rv.Layout((8,), "R(1)V(1)D(1)", (2,))}
    given = {"layers.0.w": torch.arange(8.0).chunk(2)[rank]} if rank < 2 else {}
    names = {"layers.0.w": "model.0.w"}.__getitem__
    moved = rv.redistribute_many(given, src, dst, names=names)
    return "ok" if rank < 2 or torch.equal(moved["model.0.w"], torch.arange(8.0)) else "wrong"


def test_names_are_mapped(worlds: Worlds) -> None:
    assert worlds(3).run(renamed) == ["ok"] * 3


# --- dtypes -------------------------------------------------------------------------------------


def converted(rank: int, executor: str, src_dtype: str, dst_dtype: str) -> str:
    before, after = getattr(torch, src_dtype), getattr(torch, dst_dtype)
    whole = torch.randn(12, 10, generator=_seed("w")).to(before)
    src = {"w": rv.Layout((12, 10), "R(1)V(1)D(4,1)"), "step": rv.Layout((), "R(4)V(1)D()")}
    dst = {"w": rv.Layout((12, 10), "R(1)V(1)D(1,4)"), "step": rv.Layout((), "R(4)V(1)D()")}
    given = {"w": whole.chunk(4)[rank], "step": torch.tensor(7)}
    for _ in range(2):
        moved = rv.redistribute_many(given, src, dst, dst_dtype=after, executor=executor)
        want = torch.tensor_split(whole, [3, 6, 9], 1)[rank].to(after)
        assert moved["w"].dtype == after
        assert torch.equal(moved["w"].float(), want.float())
        assert moved["step"].dtype == torch.int64
        assert moved["step"] == 7
    return "ok"


@pytest.mark.parametrize(
    "src_dtype, dst_dtype, executor",
    [
        ("bfloat16", "float32", "dist"),
        ("float32", "bfloat16", "peer"),
        ("float32", "float16", "dist"),
        ("float64", "float32", "peer"),
        ("float8_e4m3fn", "bfloat16", "peer"),
    ],
)
def test_dtype_conversions_equal_those_of_torch(
    worlds: Worlds, executor: str, src_dtype: str, dst_dtype: str
) -> None:
    # The second column range is D(1,4) of 10 columns: 3, 3, 3 and 1.
    assert worlds(4).run(converted, executor, src_dtype, dst_dtype) == ["ok"] * 4


def scaled(rank: int, executor: str) -> str:
    """bfloat16 to float8 with a scale, and back."""
    whole = (100 * torch.randn(8, 6, generator=_seed("w"))).bfloat16()
    src, dst = (
        rv.Layout((8, 6), "R(1)V(1)D(2,1)", (0, 1)),
        rv.Layout((8, 6), "R(1)V(1)D(1,1)", (2,)),
    )
    scale = float(whole.abs().max()) / 400
    fp8 = torch.float8_e4m3fn
    given = {"w": whole.chunk(2)[rank]} if rank < 2 else {}
    down = rv.redistribute_many(
        given, {"w": src}, {"w": dst}, dst_dtype=fp8, scale={"w": scale}, executor=executor
    )["w"]
    want = (whole.float() / scale).to(fp8)
    if rank == 2:
        assert torch.equal(down.view(torch.uint8), want.view(torch.uint8))
    back = rv.redistribute_many(
        {"w": down} if rank == 2 else {},
        {"w": dst},
        {"w": src},
        dst_dtype=torch.bfloat16,
        scale=torch.tensor(scale),
        executor=executor,
    )["w"]
    if rank < 2:
        assert torch.equal(back, (want.float() * scale).bfloat16().chunk(2)[rank])
    return "ok"


@pytest.mark.parametrize("executor", EXECUTORS)
def test_conversion_to_float8_and_back_applies_the_scale(worlds: Worlds, executor: str) -> None:
    assert worlds(3).run(scaled, executor) == ["ok"] * 3


def scaled_by(rank: int, scales: list[float | None]) -> list[float]:
    """An element of the result of every call; the calls differ in the scale alone."""
    side = {f"first {scales[0]}": rv.Layout((4,), "R(2)V(1)D(1)")}
    (name,) = side
    fp8 = torch.float8_e4m3fn
    calls = (
        rv.redistribute_many({name: torch.ones(4)}, side, side, dst_dtype=fp8, scale={name: scale})
        for scale in scales
    )
    return [float(moved[name][3]) for moved in calls]


@pytest.mark.parametrize("scales", [[4.0, None, 4.0], [None, 4.0, None]], ids=str)
def test_a_scale_of_none_is_no_scale_whatever_was_called_before(
    worlds: Worlds, scales: list[float | None]
) -> None:
    assert worlds(2).run(scaled_by, scales) == [[1 / (scale or 1) for scale in scales]] * 2


def misscaled(rank: int, dtypes: tuple[str, str], at_fault: int) -> tuple[str, str, float]:
    """The errors of a first and of a later call, and a result after them."""
    before, after = (getattr(torch, dtype) for dtype in dtypes)
    src, dst = ({"w": rv.Layout((4, 6), "R(1)V(1)D(1,1)", (i,))} for i in range(2))
    given = {"w": torch.ones(4, 6).to(before)} if rank == 0 else {}

    def call(*sizes: int) -> Any:
        scale = {"w": torch.full(sizes if rank == at_fault else (), 2.0)}
        return rv.redistribute_many(given, src, dst, dst_dtype=after, scale=scale)["w"]

    first = error_of(lambda: call(3, 1))
    call(4, 1)
    # A scale of more dims than the shard would make it larger.
    later = error_of(lambda: call(2, 4, 6)) if rank == at_fault else ""
    moved = call(4, 1)
    return first, later, 0.0 if moved is None else float(moved[3, 5])


@pytest.mark.parametrize(
    "dtypes, at_fault, result",
    [(("float32", "float8_e4m3fn"), 0, 0.5), (("float8_e4m3fn", "float32"), 1, 2.0)],
    ids=["to float8", "from float8"],
)
def test_scale_that_does_not_broadcast_to_the_shard_is_an_error(
    worlds: Worlds, dtypes: tuple[str, str], at_fault: int, result: float
) -> None:
    found = worlds(2).run(misscaled, dtypes, at_fault)
    error = (
        f"LayoutError: redistribute_many: tensor 'w': rank {at_fault}: its scale does not "
        "broadcast to the shard [4, 6]."
    )
    assert [first for first, _, _ in found] == [error] * 2
    assert found[at_fault][1] == error
    assert [value for _, _, value in found] == [0.0, result]


# --- errors -------------------------------------------------------------------------------------

ROWS, COLUMNS = rv.Layout((8, 6), "R(1)V(1)D(2,1)"), rv.Layout((8, 6), "R(1)V(1)D(1,2)")


def _call(rank: int, salt: str = "", **changed: Any) -> Any:
    """A legal call, except for the changed arguments; ``salt`` makes its transition new."""
    arguments: dict[str, Any] = {
        "tensors": {"a": torch.ones(4, 6), "b": torch.ones(4, 6)},
        "src": {"a": ROWS, "b": ROWS},
        "dst": {"a": COLUMNS, "b": COLUMNS},
    } | changed
    if salt:
        for side, value in (("tensors", torch.ones(4, 6)), ("src", ROWS), ("dst", COLUMNS)):
            arguments[side] = {salt: value} | arguments[side]
    return rv.redistribute_many(**arguments)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "names": (
        {"dst": {"a": COLUMNS, "c": COLUMNS}},
        r"LayoutError: redistribute_many: src and dst differ in the names \['b', 'c'\]",
    ),
    "a layout": (
        {"dst": {"a": COLUMNS, "b": ROWS}},
        r"LayoutError: redistribute_many: ranks disagree about tensor 2: rank 0 asks for "
        r"'b': .*rank 1 for 'b': .*",
    ),
    "memory_limit": (
        {"memory_limit": 1 << 20},
        r"LayoutError: .* about memory_limit: rank 0 asks for None, rank 1 for 1048576",
    ),
    "executor": (
        {"executor": "dist"},
        r"LayoutError: .* about executor: rank 0 asks for auto, rank 1 for dist",
    ),
    "a shape": (
        {"tensors": {"a": torch.ones(4, 6), "b": torch.ones(4, 5)}},
        r"ShapeMismatchError: redistribute_many: tensor 'b': rank 1 passed \[4, 5\], its shard is "
        r"\[4, 6\]",
    ),
    "a missing tensor": (
        {"tensors": {"a": torch.ones(4, 6)}},
        r"ShapeMismatchError: .*tensor 'b': rank 1 passed None, its shard is \[4, 6\]",
    ),
    "a dtype": (
        {"tensors": {"a": torch.ones(4, 6), "b": torch.ones(4, 6).double()}},
        r"ShapeMismatchError: .*tensor 'b': ranks disagree about dtype: rank 0 has float32, rank 1 "
        r"has float64",
    ),
    "an unknown name": (
        {"tensors": {"a": torch.ones(4, 6), "b": torch.ones(4, 6), "z": torch.ones(1)}},
        r"LayoutError: redistribute_many: tensors has the unknown names \['z'\]",
    ),
    "an unknown name of a scale": (
        {"scale": {"z": 2.0}},
        r"LayoutError: redistribute_many: scale has the unknown names \['z'\]",
    ),
    "an unknown name of a dtype": (
        {"dtype": {"z": torch.float32}},
        r"LayoutError: redistribute_many: dtype has the unknown names \['z'\]",
    ),
    "an unknown name of a dst_dtype": (
        {"dst_dtype": {"z": torch.float64}},
        r"LayoutError: redistribute_many: dst_dtype has the unknown names \['z'\]",
    ),
    "an out's dtype": (
        {"out": {"a": torch.ones(8, 3).half()}},
        r"ShapeMismatchError: .*tensor 'a': rank 1 passed out of float16, it becomes float32",
    ),
    "a scale": (
        {"scale": {"a": 2.0}},
        r"LayoutError: .*ranks disagree about tensor 1: rank 0 asks for 'a'.* with a scale",
    ),
}


def one_is_wrong(rank: int, fault: str) -> tuple[str, bool]:
    """Rank 1 asks for something else; afterwards all ask for the same."""
    error = error_of(lambda: _call(rank, fault, **(FAULTS[fault][0] if rank == 1 else {})))
    again = _call(rank, fault)
    return error, bool((again["b"] == 1).all())


@pytest.mark.parametrize("fault", FAULTS)
def test_disagreement_is_an_error_on_every_rank_and_the_next_call_succeeds(
    worlds: Worlds, fault: str
) -> None:
    for error, is_right in worlds(2).run(one_is_wrong, fault):
        assert re.match(FAULTS[fault][1], error), error
        assert is_right


def all_are_wrong(rank: int, make: Callable[[], dict[str, Any]]) -> str:
    return error_of(lambda: _call(rank, make.__name__, **make()))


def shared_out() -> dict[str, Any]:
    block = torch.ones(8, 6)
    return {
        "tensors": {"a": block[:4], "b": torch.ones(4, 6)},
        "out": {"a": block.view(-1)[:24].view(8, 3)},
    }


def low_limit() -> dict[str, Any]:
    return {"memory_limit": 8}


def converting_dtype() -> dict[str, Any]:
    return {"dtype": torch.bfloat16}


def text_without_shape() -> dict[str, Any]:
    return {"src": {"a": "R(1)V(1)D(2,1)", "b": ROWS}}


def needs_grad() -> dict[str, Any]:
    return {"tensors": {"a": torch.ones(4, 6, requires_grad=True), "b": torch.ones(4, 6)}}


@pytest.mark.parametrize(
    "make, message",
    [
        (shared_out, "LayoutError: .*'a'.*out shares memory"),
        (
            low_limit,
            "MemoryLimitError: .*memory_limit=8 bytes per rank, .*least that was found is \\d+; "
            "the src and dst shards alone are 576.",
        ),
        (
            converting_dtype,
            "LayoutError: .*: rank 0 passed float32, and dtype= says bfloat16. .*dst_dtype=",
        ),
        (text_without_shape, "LayoutError: .*'a': the text 'R.1.V.1.D.2,1.' says no shape"),
        (needs_grad, "LayoutError: .*'a'.*carries no gradient"),
    ],
)
def test_invalid_requests_are_errors(
    worlds: Worlds, make: Callable[[], dict[str, Any]], message: str
) -> None:
    for error in worlds(2).run(all_are_wrong, make):
        assert re.match(message, error), error


def of_another_dtype(rank: int) -> list[str]:
    """Rank 1 has no tensor: by ``dtype`` it says which of two calls it joins."""
    src, dst = (rv.Layout((4,), "R(1)V(1)D(1)", (i,)) for i in range(2))
    found = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        given = {"w": torch.arange(4.0).to(dtype)} if rank == 0 else {}
        moved = rv.redistribute_many(given, {"w": src}, {"w": dst}, dtype=dtype)["w"]
        found.append("None" if moved is None else str(moved.dtype))
    return found


def test_dtype_argument_selects_the_call_on_a_rank_without_tensors(worlds: Worlds) -> None:
    want = ["torch.float32", "torch.float64", "torch.float32"]
    assert worlds(2).run(of_another_dtype) == [["None"] * 3, want]


def with_progress(rank: int) -> str:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        _call(rank, progress=True)
    silent = io.StringIO()
    with contextlib.redirect_stderr(silent):
        _call(rank)
    assert silent.getvalue() == ""
    sys.stderr.flush()
    return stderr.getvalue()


def test_progress_bar_is_shown_on_request(worlds: Worlds) -> None:
    assert all("100%" in text for text in worlds(2).run(with_progress))


LATER: dict[str, tuple[dict[str, Any], str]] = {
    "a shape": (
        {"tensors": {"a": torch.ones(4, 6), "b": torch.ones(4, 5)}},
        r"ShapeMismatchError: .*tensor 'b': rank \d passed \[4, 5\], its shard is \[4, 6\]",
    ),
    "a missing tensor": (
        {"tensors": {"a": torch.ones(4, 6)}},
        r"ShapeMismatchError: .*tensor 'b': rank \d passed None",
    ),
    "an out's shape": (
        {"out": {"a": torch.ones(8, 2)}},
        r"ShapeMismatchError: .*tensor 'a': rank \d passed \[8, 2\], its out is \[8, 3\]",
    ),
    "an out's dtype": (
        {"out": {"a": torch.ones(8, 3).half()}},
        r"ShapeMismatchError: .*tensor 'a': rank \d passed out of float16, it becomes float32",
    ),
    "an out's name": (
        {"out": {"z": torch.ones(8, 3)}},
        r"LayoutError: .*out has the unknown names \['z'\]",
    ),
}


def later_is_wrong(rank: int, fault: str) -> tuple[str, bool]:
    """The first and the third call are right, the second is wrong."""
    salt = f"later {fault}"
    _call(rank, salt)
    error = error_of(lambda: _call(rank, salt, **LATER[fault][0]))
    return error, bool((_call(rank, salt)["b"] == 1).all())


@pytest.mark.parametrize("fault", LATER)
def test_later_call_with_wrong_tensors_is_an_error(worlds: Worlds, fault: str) -> None:
    for error, is_right in worlds(2).run(later_is_wrong, fault):
        assert re.match(LATER[fault][1], error), error
        assert is_right


def in_another_order(rank: int) -> int:
    """Rank 1 reverses its mappings in the second call, which is still the same call."""
    before = len(World.of().agreed)
    _call(rank, "order", dst_dtype={"a": torch.float64, "b": torch.float64})
    tensors = {"b": torch.ones(4, 6), "a": torch.ones(4, 6)}
    dtypes = {"b": torch.float64, "a": torch.float64}
    turned = {"tensors": tensors, "dst_dtype": dtypes} if rank == 1 else {"dst_dtype": dtypes}
    _call(rank, "order", **turned)
    return len(World.of().agreed) - before


def test_order_of_tensors_in_a_mapping_does_not_start_a_new_agreement(worlds: Worlds) -> None:
    assert worlds(2).run(in_another_order) == [1, 1]
