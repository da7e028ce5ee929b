"""redistribute_many on processes: the data, what it accepts, and errors on every rank."""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm.run.world import World
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import error_of, shard_of
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


@pytest.mark.parametrize(
    "executor, limit, seed",
    [("dist", None, 0), ("peer", 20 << 10, 1), ("dist", 20 << 10, 2), ("peer", None, 3)],
)
@on_ranks(6)
def test_every_tensor_is_redistributed_correctly(
    rank: int, executor: str, limit: int | None, seed: int
) -> None:
    """Two calls; in the second tensors and results are strided."""
    pairs = random_pairs(seed, 6)
    src, dst = ({n: pair[side] for n, pair in pairs.items()} for side in (0, 1))
    mine = {name: shard_of(rank, layout, len(name)) for name, layout in src.items()}
    options: dict[str, Any] = {"executor": executor, "memory_limit": limit}
    first = rv.redistribute_many(mine, src, dst, **options)
    strided = {n: None if t is None else _every_other(t) for n, t in mine.items()}
    outs = {n: _every_other(torch.zeros_like(t)) for n, t in first.items() if t is not None}
    second = rv.redistribute_many(strided, src, dst, out=outs, **options)
    assert all(second[name] is out for name, out in outs.items())
    for name, pair in pairs.items():
        assert_moved(first[name], *pair, seed=len(name))
        assert_moved(second[name], *pair, seed=len(name))


RING = rv.Network.preset("ring", 4, link=rv.Link(1e-6, 1e9))


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(4)
def test_tensors_go_along_trees_that_all_ranks_agree_on(rank: int, executor: str) -> None:
    """Rank 1 finds no trees, as another machine may, and takes those of rank 0."""
    pairs = {
        f"{i}.{size}": (rv.Layout((size, 8), a, range(4)), rv.Layout((size, 8), b, range(4)))
        for i, (a, b) in enumerate(
            [("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)"), ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)")]
        )
        for size in (4096, 8192)
    }
    src, dst = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
    mine = {name: shard_of(rank, layout, len(name)) for name, layout in src.items()}
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("rvdcomm.plans.many_by_trees._may_go", lambda one: False)
        bundle = rv.plan_many(src, dst, "float32", topology=RING, executor=executor)
        assert any(m.plan.forest is not None for m in bundle.members) == (rank != 1)
        found = rv.redistribute_many(mine, src, dst, topology=RING, executor=executor)
    for name, pair in pairs.items():
        assert_moved(found[name], *pair, seed=len(name))


def _every_other(tensor: Tensor) -> Tensor:
    """The same values, in every other element of memory."""
    return torch.stack([tensor, torch.full_like(tensor, 7)], -1)[..., 0]


# --- sources and targets that are parts of other tensors ----------------------------------------


def _seed(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(ord(name))


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(4)
def test_sources_may_be_views_of_fused_and_transposed_tensors(rank: int, executor: str) -> None:
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


@on_ranks(3)
def test_names_are_mapped(rank: int) -> None:
    src = {"layers.0.w": rv.Layout((8,), "R(1)V(1)D(2)", (0, 1))}
    dst = {"model.0.w": rv.Layout((8,), "R(1)V(1)D(1)", (2,))}
    given = {"layers.0.w": torch.arange(8.0).chunk(2)[rank]} if rank < 2 else {}
    names = {"layers.0.w": "model.0.w"}.__getitem__
    moved = rv.redistribute_many(given, src, dst, names=names)
    assert rank < 2 or torch.equal(moved["model.0.w"], torch.arange(8.0))


# --- dtypes -------------------------------------------------------------------------------------


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
@on_ranks(4)
def test_dtype_conversions_equal_those_of_torch(
    rank: int, src_dtype: str, dst_dtype: str, executor: str
) -> None:
    before, after = getattr(torch, src_dtype), getattr(torch, dst_dtype)
    whole = torch.randn(12, 10, generator=_seed("w")).to(before)
    src = {"w": rv.Layout((12, 10), "R(1)V(1)D(4,1)"), "step": rv.Layout((), "R(4)V(1)D()")}
    dst = {"w": rv.Layout((12, 10), "R(1)V(1)D(1,4)"), "step": rv.Layout((), "R(4)V(1)D()")}
    given = {"w": whole.chunk(4)[rank], "step": torch.tensor(7)}
    for _ in range(2):
        moved = rv.redistribute_many(given, src, dst, dst_dtype=after, executor=executor)
        # D(1,4) of 10 columns: 3, 3, 3 and 1.
        want = torch.tensor_split(whole, [3, 6, 9], 1)[rank].to(after)
        assert moved["w"].dtype == after
        assert torch.equal(moved["w"].float(), want.float())
        assert moved["step"].dtype == torch.int64
        assert moved["step"] == 7


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(3)
def test_conversion_to_float8_and_back_applies_the_scale(rank: int, executor: str) -> None:
    whole = (100 * torch.randn(8, 6, generator=_seed("w"))).bfloat16()
    src = {"w": rv.Layout((8, 6), "R(1)V(1)D(2,1)", (0, 1))}
    dst = {"w": rv.Layout((8, 6), "R(1)V(1)D(1,1)", (2,))}
    size, fp8 = float(whole.abs().max()) / 400, torch.float8_e4m3fn
    given = {"w": whole.chunk(2)[rank]} if rank < 2 else {}
    options: dict[str, Any] = {"dst_dtype": fp8, "scale": {"w": size}, "executor": executor}
    down = rv.redistribute_many(given, src, dst, **options)["w"]
    want = (whole.float() / size).to(fp8)
    if rank == 2:
        assert torch.equal(down.view(torch.uint8), want.view(torch.uint8))
    options |= {"dst_dtype": torch.bfloat16, "scale": torch.tensor(size)}
    back = rv.redistribute_many({"w": down} if rank == 2 else {}, dst, src, **options)["w"]
    if rank < 2:
        assert torch.equal(back, (want.float() * size).bfloat16().chunk(2)[rank])


@pytest.mark.parametrize("scales", [[4.0, None, 4.0], [None, 4.0, None]], ids=str)
@on_ranks(2)
def test_a_scale_of_none_is_no_scale_whatever_was_called_before(
    rank: int, scales: list[float | None]
) -> None:
    """The calls differ in the scale alone."""
    side = {(name := f"first {scales[0]}"): rv.Layout((4,), "R(2)V(1)D(1)")}
    for scale in scales:
        options: dict[str, Any] = {"dst_dtype": torch.float8_e4m3fn, "scale": {name: scale}}
        moved = rv.redistribute_many({name: torch.ones(4)}, side, side, **options)
        assert float(moved[name][3]) == 1 / (scale or 1)


@pytest.mark.parametrize(
    "dtypes, at_fault, result",
    [(("float32", "float8_e4m3fn"), 0, 0.5), (("float8_e4m3fn", "float32"), 1, 2.0)],
    ids=["to float8", "from float8"],
)
@on_ranks(2)
def test_scale_that_does_not_broadcast_to_the_shard_is_an_error(
    rank: int, dtypes: tuple[str, str], at_fault: int, result: float
) -> None:
    """In a first call and in a later one; the call after them is right."""
    before, after = (getattr(torch, dtype) for dtype in dtypes)
    src, dst = ({"w": rv.Layout((4, 6), "R(1)V(1)D(1,1)", (i,))} for i in range(2))
    given = {"w": torch.ones(4, 6).to(before)} if rank == 0 else {}

    def call(*sizes: int) -> Any:
        scale = {"w": torch.full(sizes if rank == at_fault else (), 2.0)}
        return rv.redistribute_many(given, src, dst, dst_dtype=after, scale=scale)["w"]

    error = (
        f"LayoutError: redistribute_many: tensor 'w': rank {at_fault}: its scale does not "
        "broadcast to the shard [4, 6]."
    )
    assert error_of(lambda: call(3, 1)) == error
    call(4, 1)
    if rank == at_fault:
        # A scale of more dims than the shard would make it larger.
        assert error_of(lambda: call(2, 4, 6)) == error
    moved = call(4, 1)
    assert moved is None if rank == 0 else float(moved[3, 5]) == result


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


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_disagreement_is_an_error_on_every_rank_and_the_next_call_succeeds(
    rank: int, fault: str
) -> None:
    """Rank 1 asks for something else; afterwards all ask for the same."""
    options, message = FAULTS[fault]
    error = error_of(lambda: _call(rank, fault, **(options if rank == 1 else {})))
    assert re.match(message, error), error
    assert (_call(rank, fault)["b"] == 1).all()


def shared_out() -> dict[str, Any]:
    block = torch.ones(8, 6)
    return {
        "tensors": {"a": block[:4], "b": torch.ones(4, 6)},
        "out": {"a": block.view(-1)[:24].view(8, 3)},
    }


INVALID: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "shared out": (shared_out, "LayoutError: .*'a'.*out shares memory"),
    "low limit": (
        lambda: {"memory_limit": 8},
        "MemoryLimitError: .*memory_limit=8 bytes per rank, .*least that was found is \\d+; "
        "the src and dst shards alone are 576.",
    ),
    "converting dtype": (
        lambda: {"dtype": torch.bfloat16},
        "LayoutError: .*: rank 0 passed float32, and dtype= says bfloat16. .*dst_dtype=",
    ),
    "text without shape": (
        lambda: {"src": {"a": "R(1)V(1)D(2,1)", "b": ROWS}},
        "LayoutError: .*'a': the text 'R.1.V.1.D.2,1.' says no shape",
    ),
    "needs grad": (
        lambda: {"tensors": {n: torch.ones(4, 6, requires_grad=n == "a") for n in "ab"}},
        "LayoutError: .*'a'.*carries no gradient",
    ),
}


@pytest.mark.parametrize("what", INVALID)
@on_ranks(2)
def test_invalid_requests_are_errors(rank: int, what: str) -> None:
    make, message = INVALID[what]
    error = error_of(lambda: _call(rank, what, **make()))
    assert re.match(message, error), error


@on_ranks(2)
def test_dtype_argument_selects_the_call_on_a_rank_without_tensors(rank: int) -> None:
    """Rank 1 has no tensor: by ``dtype`` it says which of two calls it joins."""
    src, dst = ({"w": rv.Layout((4,), "R(1)V(1)D(1)", (i,))} for i in range(2))
    for dtype in (torch.float32, torch.float64, torch.float32):
        given = {"w": torch.arange(4.0).to(dtype)} if rank == 0 else {}
        moved = rv.redistribute_many(given, src, dst, dtype=dtype)["w"]
        assert moved is None if rank == 0 else moved.dtype == dtype


@on_ranks(2)
def test_progress_bar_is_shown_on_request(rank: int) -> None:
    for is_shown in (True, False):
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            _call(rank, progress=is_shown)
        assert "100%" in stderr.getvalue() if is_shown else stderr.getvalue() == ""


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


@pytest.mark.parametrize("fault", LATER)
@on_ranks(2)
def test_later_call_with_wrong_tensors_is_an_error(rank: int, fault: str) -> None:
    """The first and the third call are right, the second is wrong."""
    (options, message), salt = LATER[fault], f"later {fault}"
    _call(rank, salt)
    error = error_of(lambda: _call(rank, salt, **options))
    assert re.match(message, error), error
    assert (_call(rank, salt)["b"] == 1).all()


@on_ranks(2)
def test_order_of_tensors_in_a_mapping_does_not_start_a_new_agreement(rank: int) -> None:
    """Rank 1 reverses its mappings in the second call, which is still the same call."""
    before = len(World.of().agreed)
    _call(rank, "order", dst_dtype={"a": torch.float64, "b": torch.float64})
    tensors = {"b": torch.ones(4, 6), "a": torch.ones(4, 6)}
    turned = {"tensors": tensors} if rank == 1 else {}
    _call(rank, "order", dst_dtype={"b": torch.float64, "a": torch.float64}, **turned)
    assert len(World.of().agreed) == before + 1


@pytest.mark.parametrize("option", ["dtype", "dst_dtype"])
@on_ranks(2)
def test_what_is_no_dtype_on_one_rank_is_refused_on_every_rank(rank: int, option: str) -> None:
    layout, options = "R(1)V(1)D(2) shape(4)", {option: {"a": []} if rank else None}
    with pytest.raises(rv.LayoutError, match=rf"{option} is \[\]; give a dtype of torch"):
        rv.redistribute_many({"a": torch.zeros(2)}, {"a": layout}, {"a": layout}, **options)
