"""Every kind of tensor is accepted by every entry point, or is an error that says what to pass."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.forward_ad import dual_level, make_dual
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import rvdcomm as rv
from rvdcomm.checkpoint import commit_shards, load_shards, save_shards
from tests.covering import each_value
from tests.dist.on_ranks import on_ranks
from tests.dist.shards import error_of

pytestmark = pytest.mark.dist

SHAPE = (4, 6)

Use = Callable[[Callable[[Any], Any]], Any]
"""Calls a function with a tensor of some kind, and returns what the function returns."""


def pair() -> tuple[rv.Layout, rv.Layout]:
    """Layouts of which every rank has the whole tensor."""
    layout = rv.Layout(SHAPE, f"R({dist.get_world_size()})V(1)D(1,1)")
    return layout, layout


def values() -> Tensor:
    return torch.arange(24.0).view(SHAPE)


# --- kinds of tensors ---------------------------------------------------------------------------


ONES = torch.ones(SHAPE)


class Named(Tensor):
    """A subclass that changes nothing."""


class Weight(torch.nn.Parameter):
    """The same of a parameter, as inference engines have them."""


def strided() -> Tensor:
    return torch.stack([values(), values()], -1)[..., 0]


def resized(num_bytes: int) -> Tensor:
    tensor = values().clone()
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def late_view() -> Tensor:
    """A view of the end of a storage that was shortened, but is still longer than the view."""
    whole = torch.zeros(60)
    view = whole[36:].view(SHAPE)
    whole.untyped_storage().resize_(100)
    return view


def negated() -> Tensor:
    """The imaginary part of a conjugated tensor."""
    return torch.complex(values(), -values()).conj().imag


def inference() -> Tensor:
    with torch.inference_mode():
        return values()


def dtensor() -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(values(), mesh, [Replicate()], run_check=False)


def async_collective() -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(values())


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(SHAPE)


def under_fake_mode(call: Callable[[Any], Any]) -> Any:
    tensor = values()
    with FakeTensorMode():
        return call(tensor)


def inside(transform: Callable[..., Any]) -> Use:
    """Call it inside a function that torch.func transforms."""

    def use(call: Callable[[Any], Any]) -> Any:
        found: list[Any] = []

        def function(x: Tensor) -> Tensor:
            found.append(call(x))
            return x.sum()

        quietly(lambda: transform(function))
        return found[0]

    return use


def given(make: Callable[[], Any]) -> Use:
    return lambda call: call(quietly(make))


def quietly(make: Callable[[], Any]) -> Any:
    """Make a tensor without the warnings of torch about new kinds of tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def as_dual(call: Callable[[Any], Any]) -> Any:
    with dual_level():
        return call(quietly(lambda: make_dual(values(), values())))


USED: dict[str, Use] = {
    "plain": given(values),
    "a Parameter": given(lambda: torch.nn.Parameter(values(), requires_grad=False)),
    "a Parameter that requires grad": given(lambda: torch.nn.Parameter(values())),
    "a Buffer": given(lambda: torch.nn.Buffer(values())),
    "a subclass": given(lambda: values().as_subclass(Named)),
    "a subclass of Parameter": given(lambda: Weight(values(), requires_grad=False)),
    "strided": given(strided),
    "transposed": given(lambda: values().t().contiguous().t()),
    "a view": given(lambda: torch.cat([torch.zeros(1, 6), values()])[1:]),
    "of numpy": given(lambda: torch.from_numpy(values().numpy())),
    "copied on write": given(lambda: torch._lazy_clone(values())),
    "of odd strides": given(lambda: values().clone().as_strided(SHAPE, (6, 1))),
}
"""Kinds of tensors that can be read and written."""

READ: dict[str, tuple[Use, str]] = {
    "expanded": (given(lambda: torch.zeros(1, 6).expand(4, 6)), "elements that share memory"),
    "overlapping": (
        given(lambda: torch.zeros(24).as_strided(SHAPE, (3, 1))),
        "elements that share memory",
    ),
    "negated": (given(negated), "negated lazily"),
    "made in inference mode": (given(inference), r"under torch.inference_mode\(\)"),
}
"""Kinds of tensors that can be read but not written, and the reason in the error."""

REFUSED: dict[str, tuple[Use, str]] = {
    "a list": (given(lambda: values().tolist()), "of type list.* pass torch.as_tensor"),
    "a numpy array": (given(lambda: np.zeros(SHAPE, "float32")), "of type ndarray.* pass torch.as"),
    "a text": (given(lambda: "x"), "of type str"),
    "meta": (given(lambda: torch.zeros(SHAPE, device="meta")), "device meta .* to_empty"),
    "an empty meta": (given(lambda: torch.zeros(0, device="meta")), "device meta"),
    "sparse COO": (given(lambda: values().to_sparse()), r"no strides .*to_dense\(\)"),
    "sparse CSR": (given(lambda: values().to_sparse_csr()), r"no strides .*to_dense\(\)"),
    "mkldnn": (given(lambda: values().to_mkldnn()), r"no strides .*to_dense\(\)"),
    "nested": (
        given(lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])),
        r"nested; .* unbind\(\)",
    ),
    "jagged": (
        given(lambda: torch.nested.nested_tensor([torch.zeros(2)] * 2, layout=torch.jagged)),
        r"NestedTensor: .* unbind\(\)",
    ),
    "quantized": (
        given(lambda: torch.quantize_per_tensor(values(), 1.0, 0, torch.qint8)),
        r"quantized; .*int_repr\(\)",
    ),
    "freed": (given(lambda: resized(0)), "needs 96 bytes of its storage, which has 0"),
    "cut short": (given(lambda: resized(40)), "needs 96 bytes of its storage, which has 40"),
    "cut short, a view": (given(late_view), "needs 240 bytes of its storage, which has 100"),
    "zeros without memory": (given(lambda: torch._efficientzerotensor(SHAPE)), r"clone\(\)"),
    "uninitialized": (given(torch.nn.UninitializedParameter), "uninitialized"),
    "a DTensor": (given(dtensor), r"DTensor: use rvdcomm.interop.dtensor.*to_local\(\)"),
    "an AsyncCollectiveTensor": (given(async_collective), r"pass tensor.wait\(\)"),
    "a FakeTensor": (given(fake), "FakeTensor: it has no values"),
    "a MaskedTensor": (
        given(lambda: masked_tensor(values(), values() > 3)),
        r"MaskedTensor: pass tensor.get_data\(\)",
    ),
    "a wrapper": (given(lambda: TwoTensor(values(), values())), "TwoTensor: its values are in"),
    "under FakeTensorMode": (under_fake_mode, "a mode is active .* call it outside"),
    "under vmap": (
        inside(lambda f: torch.vmap(f)(torch.zeros(2, *SHAPE))),
        "torch.func transforms .* outside",
    ),
    "under grad": (inside(lambda f: torch.func.grad(f)(values())), "torch.func transforms"),
    "under jvp": (
        inside(lambda f: torch.func.jvp(f, (values(),), (values(),))),
        "forward-mode tangent",
    ),
    "under functionalize": (
        inside(lambda f: torch.func.functionalize(f)(values())),
        "torch.func transforms",
    ),
    "with a tangent": (as_dual, "forward-mode tangent"),
}
"""Kinds of tensors that can be neither read nor written, and what the error says."""


# --- entries ------------------------------------------------------------------------------------


def by_redistribute(group: Any, tensor: Any, out: Any = None) -> Any:
    return rv.redistribute(tensor, *pair(), out=out, group=group)


def by_pending(group: Any, tensor: Any, out: Any = None) -> Any:
    return rv.redistribute(tensor, *pair(), out=out, group=group, async_op=True).wait()


def by_redistributor(group: Any, tensor: Any, out: Any = None) -> Any:
    return rv.Redistributor(rv.plan(*pair()), group)(tensor, out=out)


def by_redistribute_many(group: Any, tensor: Any, out: Any = None) -> Any:
    src, dst = ({"x": layout, "y": layout} for layout in pair())
    outs = {} if out is None else {"y": out}
    with torch.no_grad():
        moved = rv.redistribute_many(
            {"x": ONES, "y": tensor}, src, dst, out=outs, group=group, executor="dist"
        )
    return moved["y"]


ENTRIES = (by_redistribute, by_pending, by_redistributor, by_redistribute_many)
Entry = Callable[..., Any]


def new_group() -> Any:
    """A group in which nothing is agreed yet."""
    return dist.new_group(list(range(dist.get_world_size())))


def use_of(kind: str) -> Use:
    if kind in USED:
        return USED[kind]
    return (READ if kind in READ else REFUSED)[kind][0]


def fault_of(call: Callable[[], Any], want: Any, out: Any = None) -> str:
    """The error of a call, or what is wrong with its result."""
    results: list[Any] = []
    error = error_of(lambda: results.append(call()))
    if error != "none":
        return error
    if out is not None and results[0] is not out:
        return "out is not returned"
    return "none" if torch.equal(results[0].detach(), want.detach()) else f"gave {results[0]}"


def read(rank: int, kind: str, entry: Entry, is_later: bool, victim: int = 0) -> str:
    """Let one rank pass a tensor of some kind."""
    group = new_group()
    if is_later:
        entry(group, values())
    if rank != victim:
        return fault_of(lambda: entry(group, values()), values())
    return use_of(kind)(lambda x: fault_of(lambda: entry(group, x), x))


def write(rank: int, kind: str, entry: Entry, is_later: bool, victim: int = 0) -> str:
    """Let one rank pass an ``out`` of some kind."""
    group, want = new_group(), values() + 1
    if is_later:
        entry(group, want, values())
    if rank != victim:
        return fault_of(lambda: entry(group, want), want)
    with torch.no_grad():
        return use_of(kind)(lambda out: fault_of(lambda: entry(group, want, out), want, out))


CALLS: dict[str, Any] = {"entry": ENTRIES, "is_later": [False, True]}


def assert_refused(error: str, words: str) -> None:
    assert re.match(f"LayoutError: redistribute.*{words}", error), error


@each_value(kind=[*USED, *READ], **CALLS)
@on_ranks(1)
def test_readable_kinds_of_tensors_are_accepted(
    rank: int, kind: str, entry: Entry, is_later: bool
) -> None:
    assert read(rank, kind, entry, is_later) == "none"


@each_value(kind=USED, **CALLS)
@on_ranks(1)
def test_writable_kinds_of_tensors_are_accepted_as_out(
    rank: int, kind: str, entry: Entry, is_later: bool
) -> None:
    assert write(rank, kind, entry, is_later) == "none"


@each_value(kind=REFUSED, **CALLS)
@on_ranks(1)
def test_unreadable_kinds_of_tensors_raise_layout_error_with_advice(
    rank: int, kind: str, entry: Entry, is_later: bool
) -> None:
    assert_refused(read(rank, kind, entry, is_later), REFUSED[kind][1])


@each_value(kind=[*READ, *REFUSED], **CALLS)
@on_ranks(1)
def test_unwritable_kinds_of_out_raise_layout_error_with_advice(
    rank: int, kind: str, entry: Entry, is_later: bool
) -> None:
    assert_refused(write(rank, kind, entry, is_later), (READ | REFUSED)[kind][1])


# --- on every rank ------------------------------------------------------------------------------


@each_value(
    kind=REFUSED, entry=[by_redistribute, by_pending, by_redistribute_many], act=[read, write]
)
@on_ranks(2)
def test_error_of_one_rank_in_a_first_call_is_raised_on_every_rank(
    rank: int, kind: str, entry: Entry, act: Callable[..., str]
) -> None:
    assert_refused(act(rank, kind, entry, False, 1), f"rank 1: .*{REFUSED[kind][1]}")


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "executor": ({"executor": "mpi"}, "executor 'mpi' is unknown; use one of auto, dist, peer."),
    "executor of no text": ({"executor": 5}, "executor is 5; give a text."),
    "shape": ({"shape": [4, 6]}, r"shape is \[4, 6\]; give a tuple of ints."),
    "shape of texts": ({"shape": ("4", 6)}, r"shape is \('4', 6\); give a tuple of ints."),
    "topology": ({"topology": "one host"}, "topology is 'one host'; give a Topology."),
    "requires_grad": ({"requires_grad": []}, r"requires_grad is \[\]; give a bool."),
    "replica_grads": ({"replica_grads": None}, "replica_grads is None; give a text."),
    "memory_limit": ({"memory_limit": True}, "memory_limit is True; give a number of bytes."),
    "dtype": ({"dtype": "float7"}, "dtype 'float7' is unknown"),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
@on_ranks(2)
def test_wrong_argument_on_one_rank_is_an_error_on_every_rank(rank: int, argument: str) -> None:
    options, words = ARGUMENTS[argument]
    mine: dict[str, Any] = options if rank == 1 else {}
    error = error_of(lambda: rv.redistribute(values(), *pair(), group=new_group(), **mine))
    assert re.match(f"LayoutError: redistribute.*rank 1: {words}", error), error


MANY: dict[str, tuple[dict[str, Any], str]] = {
    "executor": ({"executor": "mpi"}, "executor 'mpi' is unknown; use one of auto, dist, peer."),
    "tensors": ({"tensors": [1]}, "tensors is a list; give a mapping by name."),
    "out": ({"out": [1]}, "out is a list; give a mapping by name."),
    "src": ({"src": None}, "src is a NoneType; give a mapping by name."),
    "dst": ({"dst": [1]}, "dst is a list; give a mapping by name."),
    "names": ({"names": "a.*"}, "names is 'a.*'; give a function"),
    "names that fail": ({"names": {}.__getitem__}, r"names\('x'\) raises KeyError\('x'\)."),
    "names without a text": ({"names": {"x": None}.get}, r"names\('x'\) is None; give a text."),
    "memory_limit of a bool": ({"memory_limit": True}, "memory_limit is True; give a number"),
    "memory_limit": ({"memory_limit": "1"}, "memory_limit is '1'; give a number of bytes."),
    "topology": ({"topology": []}, r"topology is \[\]; give a Topology."),
    "executor of no text": ({"executor": []}, r"executor is \[\]; give a text."),
    "scale": ({"scale": "1"}, "scale is of type str"),
    "one of the scales": (
        {"scale": {"x": torch.zeros(1, device="meta")}},
        "scale 'x' is on the device meta",
    ),
}


LAYOUTS: dict[str, tuple[Any, str]] = {
    "cut off": ("R(1)V(1)D(1,2) shape(4", "cannot parse layout 'R.1.V.1.D.1,2. shape.4'"),
    "none": (5, "tensor 'x': 5 is no layout; give a Layout or a text."),
    "no hash": ([], r"tensor 'x': \[\] is no layout"),
}


def error_of_many(rank: int, options: dict[str, Any]) -> str:
    """The error of a call for which rank 1 has other arguments."""
    src, dst = ({"x": layout} for layout in pair())
    mine = {"tensors": {"x": values()}, "src": src, "dst": dst} | (options if rank == 1 else {})
    return error_of(lambda: rv.redistribute_many(group=new_group(), **mine))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", ["src", "dst"])
@on_ranks(2)
def test_wrong_layout_on_one_rank_is_an_error_on_every_rank(
    rank: int, side: str, layout: str
) -> None:
    given, words = LAYOUTS[layout]
    error = error_of_many(rank, {side: {"x": given}})
    assert re.search(f"^LayoutError: .*{words}", error), error


@on_ranks(2)
def test_names_that_do_not_match_on_one_rank_are_an_error_on_every_rank(rank: int) -> None:
    error = error_of_many(rank, {"names": lambda name: f"other.{name}"})
    assert "redistribute_many: src and dst differ in the names ['other.x', 'x']" in error


@pytest.mark.parametrize("argument", MANY)
@on_ranks(2)
def test_wrong_argument_of_redistribute_many_on_one_rank_is_an_error_on_every_rank(
    rank: int, argument: str
) -> None:
    options, words = MANY[argument]
    error = error_of_many(rank, options)
    assert re.match(f"LayoutError: redistribute_many: rank 1: {words}", error), error


# --- gradients, checkpoints, and state of torch -------------------------------------------------


@on_ranks(1)
def test_a_sparse_gradient_flows_back(rank: int) -> None:
    """The gradient of a sparse embedding lookup is a sparse tensor, which has no strides."""
    weight = values().requires_grad_()
    moved = rv.redistribute(weight, *pair())
    torch.nn.functional.embedding(torch.tensor([1, 1]), moved, sparse=True).sum().backward()
    assert weight.grad.sum(1).tolist() == [0, 2 * 6, 0, 0]


@pytest.mark.parametrize("entry", ENTRIES)
@on_ranks(1)
def test_backward_pass_detects_a_saved_tensor_that_was_overwritten_as_out(
    rank: int, entry: Entry
) -> None:
    group, weight, saved = new_group(), values().requires_grad_(), values()
    loss = (weight * saved).sum()
    entry(group, values() + 1, saved)
    assert "modified by an inplace operation" in error_of(loss.backward)


@pytest.mark.parametrize("entry", ENTRIES)
@on_ranks(1)
def test_calls_ignore_the_default_device_of_torch(rank: int, entry: Entry) -> None:
    group, tensor = new_group(), values()
    with torch.device("meta"):
        for _ in range(2):
            assert fault_of(lambda: entry(group, tensor), tensor) == "none"


def save(rank: int, kind: str, folder: Path) -> str:
    layouts = {"x": pair()[0]}

    def call(tensor: Any) -> Tensor:
        save_shards(folder, {"x": tensor}, layouts, 0)
        commit_shards(folder, [0])
        return load_shards(folder, layouts, 0)["x"]

    return use_of(kind)(lambda x: fault_of(lambda: call(x), x))


@pytest.mark.parametrize("kind", [*USED, *READ][::3])
@on_ranks(1)
def test_readable_kinds_of_tensors_are_saved(rank: int, kind: str, tmp_path: Path) -> None:
    assert save(rank, kind, tmp_path) == "none"


@pytest.mark.parametrize("kind", [*REFUSED][::5])
@on_ranks(1)
def test_unreadable_kinds_of_tensors_are_not_saved(rank: int, kind: str, tmp_path: Path) -> None:
    error = save(rank, kind, tmp_path)
    assert re.match(f"LayoutError: save_shards: .*{REFUSED[kind][1]}", error), error
