"""Storages: writes in place as new values, since the tensors of a graph never change.

After ``y = x[0]; y.mul_(2)`` a read of ``x`` gives another value than before. A walk through a
traced program therefore gives each *place* (memory of its own, or a view of it) its present value:

- a write becomes a call that returns a new value, which is put into the tensor that the place is a
  view of: ``select_scatter(x, y * 2, 0, 0)``;
- a view is computed again when it is read after such a write.

torch has a pass for this too (``ExportedProgram.run_decompositions``). It is not used, because it
traces the program again without its blocks of ``no_grad`` and ``autocast``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from superscaler_core.errors import CaptureError
from superscaler_core.rules import aten
from superscaler_core.rules.calls import TARGET as CALL
from superscaler_core.rules.records import Node, Ref, TracedValue, mapped, refs_in


class Computes(Protocol):
    """An object that computes the calls of a program, and knows the values so far."""

    def add(self, node: Node) -> None:
        """Compute a call that writes nothing in place."""

    def describe(self, value: Ref) -> TracedValue:
        """Shape and dtype of a value."""

    def has_grad(self, value: Ref) -> bool:
        """Whether a value has a gradient."""

    def check_writable(self, value: Ref, node: Node) -> None:
        """Refuse a call that writes memory whose first value may not change."""


@dataclass(frozen=True)
class StorageView:
    """A place that is a part of another, ``base``, or the same memory in another shape.

    It is result ``index`` of the call ``node``, which ``call`` is as text.
    """

    base: Place
    call: str
    index: int
    node: Node = field(compare=False, repr=False)

    @property
    def cuts_grad(self) -> bool:
        """Whether gradients do not flow from the view to its base."""
        node = self.node
        return node.base == "aten.detach" or not (node.with_grad or node.is_passed_on)


Place = Ref | StorageView
"""A place of a tensor; a ref stands for the memory that this call or argument made."""


class Storages:
    """The places of a program, and their values at the point that the walk has reached.

    Laws (tests/superscaler_core/front_end/test_storage.py): the calls that ``run`` passes on write
    nothing in place, and give every read the value, and the gradient, that torch gives it.

    Attributes:
        values: computes the calls.
        places: the places of refs that are not memory of their own.
        known: for each place, the number of writes to its memory before its value was computed, and
            the value.
        num_writes: number of writes to each memory so far.
        unsure: memory that calls of functions may share with other tensors.
    """

    def __init__(self, values: Computes) -> None:
        self.values = values
        self.places: dict[Ref, Place] = {}
        self.known: dict[Place, tuple[int, Ref]] = {}
        self.num_writes: Counter[Ref] = Counter()
        self.unsure: set[Ref] = set()
        self._num_calls = 0

    def run(self, node: Node) -> None:
        """Process the next call of the program."""
        if node.target == CALL:
            refs = [*refs_in(node.args), *(Ref(node.name, i) for i in range(len(node.outputs)))]
            self.unsure |= {_root(self.place(ref)) for ref in refs}
        if node.writes:
            self._write(node)
            return
        made = [Ref(node.name, i) for i in range(len(node.outputs))]
        for i, (ref, base) in enumerate(zip(made, node.shares, strict=True)):
            if base is not None:
                self.places[ref] = StorageView(self.place(base), _text(node), i, node)
        if not made or not all(self._is_known(ref) for ref in made):
            self.values.add(replace(node, args=self._read(node.args)))
            for ref in made:
                place = self.place(ref)
                self.known[place] = (self.num_writes[_root(place)], ref)

    def place(self, ref: Ref) -> Place:
        """Where a tensor of the program is."""
        return self.places.get(ref, ref)

    def read(self, ref: Ref) -> Ref:
        """The present value of a tensor of the program."""
        return self._value(self.place(ref))

    # --- reading --------------------------------------------------------------------------------

    def _is_known(self, ref: Ref) -> bool:
        place = self.place(ref)
        found = self.known.get(place)
        return found is not None and found[0] == self.num_writes[_root(place)]

    def _value(self, place: Place) -> Ref:
        count, value = self.known.get(place, (0, place))
        if isinstance(place, StorageView) and count != self.num_writes[_root(place)]:
            node = place.node
            again = replace(node, name=self._name(node), args=self._read(node.args))
            self.values.add(again)
            value = Ref(again.name, place.index)
            self.known[place] = (self.num_writes[_root(place)], value)
        assert isinstance(value, Ref)
        return value

    def _read(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call, with their present values."""
        found: dict[str, Any] = mapped(args, lambda v: self.read(v) if isinstance(v, Ref) else v)
        return found

    # --- writing --------------------------------------------------------------------------------

    def _write(self, node: Node) -> None:
        args, target = self._read(node.args), _without_writes(node)
        if -1 in node.writes.values() or not target:
            raise CaptureError(
                f"{node.target} in {node.place} has no form that returns a new tensor; compute the "
                "new tensor by other ops, such as torch.where, or put what writes in place into a "
                "function under @register_op."
            )
        for name, number in node.writes.items():
            self.places[Ref(node.name, number)] = self.place(node.args[name])
        if node.base == "aten.copy_" and args["self"] == args["src"]:
            return  # as in y[0] += 1, which first adds in place, and then assigns the sum to y[0]
        # Both forms have the same arguments, but some have other names.
        if len(aten.arguments(target)) < len(args):
            args = {name: value for name, value in args.items() if name not in node.writes}
        named = zip(aten.schema(target), args.items(), strict=True)
        passed = {name for name, _ in node.given}
        given = {
            argument.name: value
            for argument, (before, value) in named
            if before in passed or not argument.has_default_value()
        }
        outputs = node.outputs if target == node.target else self._outputs(target, given)
        self.values.add(aten.call(node, node.name, target, given, *outputs))
        for name, number in node.writes.items():
            self._put(self.place(node.args[name]), Ref(node.name, number), node)

    def _outputs(self, target: str, args: Mapping[str, Any]) -> list[TracedValue]:
        """The results of an op; a dtype may be wider than that of the memory that is written."""

        def on_meta(value: Any) -> Any:
            if not isinstance(value, Ref):
                return value
            made = self.values.describe(value)
            return torch.empty(made.shape, dtype=getattr(torch, made.dtype), device="meta")

        op: Any = aten.overload(target)
        return [aten.value_of(op(**mapped(args, on_meta)))]

    def _put(self, place: Place, new: Ref, node: Node) -> None:
        """Set the value of a place, and put it into all tensors that the place is a view of."""
        root = _root(place)
        self._check(place, new, node)
        made = {place: self._cast(new, self._value(place), node)}
        while isinstance(place, StorageView):
            made[place.base] = self._put_back(place, made[place], node)
            place = place.base
        self.num_writes[root] += 1
        self.known |= {at: (self.num_writes[root], value) for at, value in made.items()}

    def _check(self, place: Place, new: Ref, node: Node) -> None:
        root = _root(place)
        views = list(_views(place))
        self.values.check_writable(root, node)
        if root in self.unsure or any(_way_back(view.node) is None for view in views):
            raise _error(node, "writes in place what other tensors share memory with")
        had_grad = self.values.has_grad(self._value(root))
        is_cut = any(view.cuts_grad for view in views)
        if had_grad and (is_cut or not node.with_grad):
            raise _error(node, "writes in place, without gradient, what has one")
        if is_cut and self.values.has_grad(new):
            raise _error(node, "writes in place, with a gradient, what was detached")

    def _cast(self, new: Ref, old: Ref, node: Node) -> Ref:
        """The new value in the dtype of the memory; the value of wider operands is wider."""
        found, wanted = self.values.describe(new), self.values.describe(old)
        if found.dtype == wanted.dtype:
            return new
        args = {"self": new, "dtype": getattr(torch, wanted.dtype)}
        return self._call(node, "aten._to_copy.default", args, wanted)

    def _put_back(self, view: StorageView, value: Ref, node: Node) -> Ref:
        old = self._value(view.base)
        base = self.values.describe(old)
        way_back = _way_back(view.node)
        assert way_back is not None, "`_check` refuses other views"
        target, args = way_back(view, base)
        if not target:
            return value
        is_scatter = target.endswith("_scatter.default")
        given = {"self": old, "src": value} if is_scatter else {"self": value}
        return self._call(node, target, {**given, **args}, base)

    def _call(self, like: Node, target: str, args: Mapping[str, Any], made: TracedValue) -> Ref:
        # A value that is written without recording gradients has no gradient anyway.
        node = aten.call(replace(like, with_grad=True), self._name(like), target, args, made)
        self.values.add(node)
        return Ref(node.name)

    def _name(self, node: Node) -> str:
        self._num_calls += 1
        return f"{node.name}@{self._num_calls}"


def written(nodes: Sequence[Node]) -> set[Ref]:
    """The memory that a program writes, each by the ref of the call or argument that made it."""
    roots: dict[Ref, Ref] = {}
    found = set()
    for node in nodes:
        for i, base in enumerate(node.shares):
            if base is not None:
                roots[Ref(node.name, i)] = roots.get(base, base)
        changed = refs_in([node.args[name] for name in node.writes])
        found |= {roots.get(ref, ref) for ref in changed}
    return found


# --- ops that put a view back into its base -----------------------------------------------------

Back = tuple[str, Mapping[str, Any]]
"""An op and its arguments except tensors; the op is empty if the view is the base itself."""


def _scatter(op: str, *keys: str) -> Callable[[StorageView, TracedValue], Back]:
    """Back by the scatter of an op, which takes these arguments of the view too."""

    def back(view: StorageView, base: TracedValue) -> Back:
        return f"aten.{op}_scatter.default", {key: view.node.args[key] for key in keys}

    return back


def _piece(view: StorageView, base: TracedValue) -> Back:
    """Of ``narrow``, which says where its one piece starts, and of ops that split all of a dim."""
    args, outputs = view.node.args, view.node.outputs
    dim = args["dim"]
    first = args["start"] % base.shape[dim] if "start" in args else 0
    start = first + sum(out.shape[dim] for out in outputs[: view.index])
    end = start + outputs[view.index].shape[dim]
    return "aten.slice_scatter.default", {"dim": dim, "start": start, "end": end}


def _unbound(view: StorageView, base: TracedValue) -> Back:
    return "aten.select_scatter.default", {"dim": view.node.args["dim"], "index": view.index}


def _reshaped(view: StorageView, base: TracedValue) -> Back:
    return "aten.reshape.default", {"shape": list(base.shape)}


def _permuted(view: StorageView, base: TracedValue) -> Back:
    order = [dim % len(base.shape) for dim in view.node.args["dims"]]
    return "aten.permute.default", {"dims": [order.index(i) for i in range(len(order))]}


def _same_again(view: StorageView, base: TracedValue) -> Back:
    args = view.node.args
    return view.node.target, {name: args[name] for name, _ in view.node.given if name != "self"}


def _moved_back(view: StorageView, base: TracedValue) -> Back:
    args = view.node.args
    return view.node.target, {"source": args["destination"], "destination": args["source"]}


def _nothing(view: StorageView, base: TracedValue) -> Back:
    return "", {}


_PUT_BACK: Mapping[str, Callable[[StorageView, TracedValue], Back]] = {
    f"aten.{name}": how
    for how, names in {
        _scatter("slice", "dim", "start", "end", "step"): ("slice",),
        _piece: ("narrow", "split", "split_with_sizes", "chunk", "tensor_split"),
        _scatter("select", "dim", "index"): ("select",),
        _unbound: ("unbind",),
        _scatter("diagonal", "offset", "dim1", "dim2"): ("diagonal",),
        _reshaped: (
            *("view.default", "view_as", "reshape", "reshape_as", "_unsafe_view"),
            *("flatten", "unflatten", "squeeze", "unsqueeze"),
        ),
        _permuted: ("permute",),
        _same_again: ("transpose", "t", "mT", "numpy_T", "swapaxes", "swapdims"),
        _moved_back: ("movedim", "moveaxis"),
        _nothing: (
            *("detach", "alias", "contiguous", "to", "type_as", "positive"),
            *("dropout", "feature_dropout"),
        ),
    }.items()
    for name in names
}
"""By the op of a view, or its overload: the op that computes a value of its base from a value of
the view."""


def _way_back(node: Node) -> Callable[[StorageView, TracedValue], Back] | None:
    """The entry of a view in ``_PUT_BACK``; None if it has none, as a view in another dtype."""
    return _PUT_BACK.get(node.target, _PUT_BACK.get(node.base))


def _without_writes(node: Node) -> str:
    """The op that computes the same without writing: ``aten.add`` of ``aten.add_``; else empty."""
    base, _, which = node.target.rpartition(".")
    target = _RENAMED.get(node.target, f"{_RENAMED.get(base, base.removesuffix('_'))}.{which}")
    if target != node.target or not aten.is_mutable(target):
        return target if aten.takes_same(target, node.target) else ""
    # For an op with ``out=``: the overload without the written arguments.
    return aten.overload_with(base, [name for name in node.args if name not in node.writes])


_RENAMED = {
    **{f"aten.__i{name}__": f"aten.bitwise_{name}" for name in ("and", "or", "xor")},
    "aten.detach_": "aten.detach",
    "aten.normal_": "aten.normal_functional",
    "aten.bernoulli_.float": "aten.bernoulli.p",
    **{
        f"aten.{name}_.{which}": f"aten.{name}.Tensor_{which}"
        for name in ("pow", "float_power")
        for which in ("Scalar", "Tensor")
    },
    "aten.floor_divide_.Tensor": "aten.floor_divide.default",
    "aten.ldexp_.default": "aten.ldexp.Tensor",
}
"""In-place ops whose other form is not just their name without the underscore at its end."""


def _root(place: Place) -> Ref:
    while isinstance(place, StorageView):
        place = place.base
    return place


def _views(place: Place) -> Iterator[StorageView]:
    while isinstance(place, StorageView):
        yield place
        place = place.base


def _text(node: Node) -> str:
    """A call as text without its tensors; ``StorageView`` has the viewed tensor as its base."""
    args = {k: v for k, v in node.args.items() if not isinstance(v, Ref)}
    return f"{node.target} {args} {node.outputs} {node.with_grad} {node.is_passed_on}"


def _error(node: Node, why: str) -> CaptureError:
    return CaptureError(
        f"{node.target} in {node.place} {why}; use the form that returns a new tensor."
    )
