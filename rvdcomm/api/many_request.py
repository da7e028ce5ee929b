"""ManyRequest: the arguments of ``redistribute_many`` on one rank, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rvdcomm.api.float8 import Scale, fault_of_scale, fits, has_device, is_float8
from rvdcomm.api.inspect import misuse_of_types
from rvdcomm.api.many_memory import ManyMemory, Tied, group_of, overlap_text
from rvdcomm.api.options import CallOptions, Dtypes
from rvdcomm.api.tensors import fault_of, fault_of_mode, fault_of_out, place_within
from rvdcomm.errors import LayoutError, ShapeMismatchError
from rvdcomm.layout import Layout
from rvdcomm.network import Links
from rvdcomm.plans.bundle import Bundle
from rvdcomm.plans.many import matched, plan_many
from rvdcomm.run.choice import executor_name
from rvdcomm.run.request import SHARES_MEMORY, kept_place, shard_shape
from rvdcomm.text import quoted

WHAT = "redistribute_many"

_ELSEWHERE = " on other ranks, as in the first call, and here the two are tied no more"
NO_GRADIENT = (
    "the tensor requires grad, and redistribute_many carries no gradient; pass tensor.detach(), or "
    "call it under torch.no_grad()."
)


@dataclass(frozen=True)
class ManyRequest:
    """The arguments of one call; tensors by name, without those that are None.

    ``names`` holds the results of the caller's function. ``faults`` says which arguments cannot be
    used at all; such tensors are in no other field.
    """

    tensors: Mapping[str, Tensor]
    src: Mapping[str, Layout | str]
    dst: Mapping[str, Layout | str]
    names: Mapping[str, str] | None
    out: Mapping[str, Tensor]
    dst_dtype: Dtypes | None
    dtype: Dtypes | None
    scale: Scale | Mapping[str, Scale] | None
    memory_limit: int | None
    topology: Links | None
    executor: str
    faults: Sequence[str]

    @classmethod
    def of(cls, tensors: Any, src: Any, dst: Any, out: Any, asked: CallOptions) -> ManyRequest:
        """The request of a call: tensors that are None count as missing, as do unusable ones."""
        misuse = misuse_of_types(**asked._asdict())
        faults = [fault for fault in (fault_of_mode(), misuse) if fault]
        try:
            executor = executor_name(asked.executor)
        except LayoutError as error:
            faults.append(str(error))
            executor = str(asked.executor)
        dtypes, dst_dtypes = (
            _dtypes(noun, asked_for, faults)
            for noun, asked_for in (("dtype", asked.dtype), ("dst_dtype", asked.dst_dtype))
        )
        given = {"tensors": tensors, "src": src, "dst": dst, "out": {} if out is None else out}
        for noun, mapping in given.items():
            if not isinstance(mapping, Mapping):
                faults.append(f"{noun} is a {type(mapping).__name__}; give a mapping by name.")
                given[noun] = {}
        names = _renamed(given["src"], None if misuse else asked.names, faults)
        found = _usable(given["tensors"], "tensor", fault_of, faults)
        outs = _usable(given["out"], "out", fault_of_out, faults)
        by_name = asked.scale if isinstance(asked.scale, Mapping) else {"": asked.scale}
        scales = _usable(by_name, "scale", fault_of_scale, faults)
        placed = {name: each for name, each in scales.items() if has_device(each)}
        faults += _apart({"tensor": found, "out": outs, "scale": placed})
        return cls(
            found,
            given["src"],
            given["dst"],
            names,
            outs,
            dst_dtypes,
            dtypes,
            asked.scale,
            None if misuse else asked.memory_limit,
            None if misuse else asked.topology,
            executor,
            faults,
        )

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """(name in src, name in dst) of every tensor."""
        return matched(self.src, self.dst, self._name_in_dst)

    @cached_property
    def layouts(self) -> tuple[dict[str, Layout], dict[str, Layout]]:
        """The layouts of src and dst, by their own names."""
        return _layouts(self.src), _layouts(self.dst)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Identifies the call, by all that this rank knows of it.

        The order of the entries of ``tensors``, of dtypes and of ``scale`` does not matter.
        """
        mine = self.tensors
        return (
            *self.transition,
            *(
                frozenset(dtype.items()) if isinstance(dtype, Mapping) else dtype
                for dtype in (self.dtype, self.dst_dtype)
            ),
            self._has_scale,
            tuple(mine[name].dtype if name in mine else None for name in self.src),
            self.memory_limit,
            self.topology,
            self.executor,
        )

    @cached_property
    def transition(self) -> tuple[Any, ...]:
        """The part of ``key`` that does not depend on the tensors: layouts and names."""
        # No pairs: as many new tuples as tensors make the collector scan everything.
        sides = (tuple(part) for side in (self.src, self.dst) for part in (side, side.values()))
        return (*sides, None if self.names is None else tuple(self.names.values()))

    @property
    def _has_scale(self) -> frozenset[str] | bool:
        """The names that have a scale, or whether there is one for all."""
        if isinstance(self.scale, Mapping):
            return frozenset(name for name, scale in self.scale.items() if scale is not None)
        return self.scale is not None

    def asked(self) -> dict[str, Any]:
        """The values that must be equal on all ranks, the order of tensors included."""
        src, dst = self.layouts
        # Many tensors have one layout, whose text takes longer than the rest.
        texts = {layout: str(layout) for layout in {*src.values(), *dst.values()}}
        found = {}
        for i, (src_name, name) in enumerate(self.pairs):
            to = self.asked_dst_dtype(name)
            found[f"tensor {i}"] = (
                f"{src_name!r}: {texts[src[src_name]]} -> {name!r}: {texts[dst[name]]}"
                + (f" as {to}" if to else "")
                + (" with a scale" if self.scale_of(name) is not None else "")
            )
        return {
            **found,
            "memory_limit": self.memory_limit,
            "executor": self.executor,
            "topology": repr(self.topology),
        }

    def asked_dtype(self, src_name: str) -> str | None:
        """The dtype that ``src_name`` has, if the caller said it."""
        return _of(self.dtype, src_name)

    def asked_dst_dtype(self, name: str) -> str | None:
        """The dtype that the caller asked for ``name`` of dst; None if it asked for none."""
        return _of(self.dst_dtype, name)

    def becomes(self, name: str, dtype: str) -> str:
        """The dtype of ``name`` in dst, given its ``dtype`` in src.

        A single ``dst_dtype`` for all tensors applies to floating-point tensors only.
        """
        if self.dst_dtype is None:
            return dtype
        asked = self.asked_dst_dtype(name)
        is_for_all = not isinstance(self.dst_dtype, Mapping)
        if asked is None or (is_for_all and not getattr(torch, dtype).is_floating_point):
            return dtype
        return asked

    def scale_of(self, name: str) -> Scale | None:
        """The scale that was given for ``name`` of dst."""
        return self.scale.get(name) if isinstance(self.scale, Mapping) else self.scale

    def bundle(self, dtypes: Mapping[str, str]) -> Bundle:
        """The plan, once the dtype of every tensor is known."""
        src, dst = self.layouts
        sent = {s: self.sent_dtypes(name, dtypes[s]) for s, name in self.pairs}
        return plan_many(
            src,
            dst,
            {name: own for name, (own, _) in sent.items()},
            dst_dtype={name: sent[s][1] for s, name in self.pairs},
            names=self._name_in_dst,
            topology=self.topology,
            memory_limit=self.memory_limit,
            executor=self.executor,
        )

    @property
    def _name_in_dst(self) -> Callable[[str], str] | None:
        return None if self.names is None else self.names.__getitem__

    def sent_dtypes(self, name: str, dtype: str) -> tuple[str, str]:
        """The src and dst dtypes of the program, in which scaled values are float8 all the way."""
        to = self.becomes(name, dtype)
        if self.is_scaled(name, dtype):
            return (to, to) if is_float8(to) else (dtype, dtype)
        return dtype, to

    def is_scaled(self, name: str, dtype: str) -> bool:
        """Whether values are converted to or from float8 with a scale."""
        turns = is_float8(dtype) != is_float8(self.becomes(name, dtype))
        return turns and self.scale_of(name) is not None

    # --- checks ---------------------------------------------------------------------------------

    def check_usable(self, rank: int) -> None:
        """Raise for arguments that cannot be used at all."""
        for fault in self.faults:
            raise LayoutError(f"{WHAT}: rank {rank}: {fault}")

    def check(self, rank: int, tied: Tied | None = None) -> None:
        """Raise for tensors that are not what the layouts give ``rank``.

        ``tied`` is what ranks told each other about tied names; None before they did.
        """
        self.check_usable(rank)
        src, dst = self.layouts
        for noun, given, side in (
            ("tensors", self.tensors, src),
            ("out", self.out, dst),
            ("scale", self.scale, dst),
            ("dtype", self.dtype, src),
            ("dst_dtype", self.dst_dtype, dst),
        ):
            odd = sorted(set(given) - set(side), key=str) if isinstance(given, Mapping) else []
            if odd:
                raise LayoutError(f"{WHAT}: {noun} has the unknown names {odd[:5]}.")
        for name, layout in src.items():
            _check_shape(name, rank, "shard", self.tensors.get(name), layout)
        for name, tensor in self.tensors.items():
            asked = self.asked_dtype(name)
            if asked not in (None, name_of(tensor.dtype)):
                raise LayoutError(
                    f"{WHAT}: tensor {name!r}: rank {rank} passed {name_of(tensor.dtype)}, and "
                    f"dtype= says {asked}. It is the dtype that tensors have; what they become is "
                    "dst_dtype=."
                )
        for name, out in self.out.items():
            _check_shape(name, rank, "out", out, dst[name])
        for name, misuse in (self.misused(rank) or self.overwritten(rank, tied)).items():
            raise LayoutError(f"{WHAT}: tensor {name!r}: rank {rank}: {misuse}")

    def misused(self, rank: int) -> dict[str, str]:
        """The errors of tensors that lose a gradient or are misscaled, by name."""
        found = self._misscaled(rank)
        if torch.is_grad_enabled():
            found |= {name: NO_GRADIENT for name, t in self.tensors.items() if t.requires_grad}
        return found

    @cached_property
    def memory(self) -> ManyMemory:
        """Where everything that this rank passed lies."""
        by_name = self.scale if isinstance(self.scale, Mapping) else {"": self.scale}
        scales = {name: scale for name, scale in by_name.items() if scale is not None}
        return ManyMemory(self.tensors, self.out, scales)

    @cached_property
    def src_of(self) -> dict[str, str]:
        """The name in src, by the name in dst."""
        return {name: src_name for src_name, name in self.pairs}

    def overwritten(self, rank: int, tied: Tied | None) -> dict[str, str]:
        """The errors of tensors, outs and scales that share memory and may not, by name.

        ``tied`` is what ranks told each other about tied names; None before they did.
        """
        memory = self.memory
        found: dict[str, str] = {}
        for noun, name, outs in memory.sharing():
            if noun == "scale":
                found[name or outs[0]] = "its scale shares memory with an out; give another out."
            elif not (memory.are_one_out(outs) and self._is_kept(name, outs, rank)):
                found[name] = SHARES_MEMORY
        pair = memory.overlap(lambda a, b: tied is None or self._are_tied(a, b, tied))
        if pair is not None:
            found = found or {pair[0]: overlap_text(pair[1])}
        elif tied is not None and (parted := self._parted(rank, tied)):
            found = found or {parted[0]: overlap_text(parted[1], _ELSEWHERE)}
        return found

    @cached_property
    def _group_of(self) -> dict[str, int]:
        """By name in src of tensors that are one memory with others here: which memory."""
        return group_of(self.memory.tensors_in_one(self.src_of))

    def _are_tied(self, a: str, b: str, tied: Tied) -> bool:
        """Whether two names of dst are tied, as far as this rank knows in a later call."""
        (src, dst), src_of = self.layouts, self.src_of
        one, other = src_of[a], src_of[b]
        if (src[one], dst[a]) != (src[other], dst[b]):
            return False
        if one not in self.tensors:
            return tied.has(a, b)
        return one in self._group_of and self._group_of[one] == self._group_of.get(other)

    def _parted(self, rank: int, tied: Tied) -> tuple[str, str] | None:
        """Two names that have one out on other ranks alone, and are not tied here any more."""
        dst, src_of = self.layouts[1], self.src_of
        for name in tied.sharing:
            first = tied.first.get(name, name)
            is_held = src_of[name] in self.tensors and rank not in dst[name]
            if is_held and name != first and not self._are_tied(first, name, tied):
                return first, name
        return None

    def _misscaled(self, rank: int) -> dict[str, str]:
        """The errors of scales that do not broadcast to the shard that they scale, by name."""
        scales = self.scale.values() if isinstance(self.scale, Mapping) else [self.scale]
        if all(fits(scale, ()) for scale in scales):
            return {}  # Scalars, which fit any shard: no layout is looked up.
        found = {}
        for src_name, name in self.pairs:
            scale, layout = self.scale_of(name), self._scaled_side(src_name, name)
            want = None if layout is None else shard_shape(layout, rank)
            if want is not None and not fits(scale, want):
                found[src_name] = f"its scale does not broadcast to the shard {_text(want)}."
        return found

    def _scaled_side(self, src_name: str, name: str) -> Layout | None:
        """The layout whose shards are scaled; None if there is none, or this rank cannot know."""
        src, dst = self.layouts
        tensor = self.tensors.get(src_name)
        dtype = self.asked_dtype(src_name) if tensor is None else name_of(tensor.dtype)
        if dtype is not None:
            side = dst[name] if is_float8(dtype) else src[src_name]
            return side if self.is_scaled(name, dtype) else None
        # This rank has no src shard. A scale that was given by name is for a tensor that is
        # converted from float8 if it is not converted to it.
        becomes = self.asked_dst_dtype(name)
        is_from_float8 = becomes is not None and not is_float8(becomes)
        return dst[name] if is_from_float8 and isinstance(self.scale, Mapping) else None

    def _is_kept(self, src_name: str, outs: Sequence[str], rank: int) -> bool:
        """Whether a tensor is the part of its own out, one of ``outs``, that keeps its values."""
        name = next((name for name in outs if self.src_of[name] == src_name), None)
        if name is None:
            return False
        place = place_within(self.tensors[src_name], self.out[name])
        src, dst = self.layouts
        return place is not None and place == kept_place(src[src_name], dst[name], rank)

    @staticmethod
    def check_out_dtypes(
        rank: int, given: Mapping[str, object], becomes: Mapping[str, object]
    ) -> None:
        """Raise for an ``out`` of another dtype than its tensor becomes."""
        for name, dtype in given.items():
            if dtype != becomes[name]:
                raise ShapeMismatchError(
                    f"{WHAT}: tensor {name!r}: rank {rank} passed out of {name_of(dtype)}, it "
                    f"becomes {name_of(becomes[name])}."
                )

    def ranks(self, group_size: int) -> tuple[int, ...]:
        """All ranks that have to join; the whole group if the layouts cannot be read."""
        try:
            found = {layout for side in self.layouts for layout in side.values()}
        except LayoutError:
            found = set()
        if not (found and self.src and self.dst):
            return tuple(range(group_size))
        return tuple(sorted({rank for layout in found for rank in layout.ranks}))


def _layouts(given: Mapping[str, Layout | str]) -> dict[str, Layout]:
    found = {}
    for name, layout in given.items():
        if not isinstance(layout, Layout | str):
            raise LayoutError(
                f"{WHAT}: tensor {name!r}: {quoted(layout)} is no layout; give a Layout or a text."
            )
        if isinstance(layout, str):
            if "shape(" not in layout:
                raise LayoutError(
                    f"{WHAT}: tensor {name!r}: the text {layout!r} says no shape; give a Layout, "
                    "or a text with shape(...)."
                )
            layout = Layout.parse(layout)
        found[name] = layout
    return found


def _check_shape(name: str, rank: int, noun: str, tensor: Tensor | None, layout: Layout) -> None:
    want = shard_shape(layout, rank)
    got = None if tensor is None else tuple(tensor.shape)
    if got != want:
        raise ShapeMismatchError(
            f"{WHAT}: tensor {name!r}: rank {rank} passed {_text(got)}, its {noun} is "
            f"{_text(want)}."
        )


def _of(dtype: object, name: str) -> str | None:
    """The dtype of ``name``: one for all, or one by name."""
    if dtype is None:
        return None
    found = dtype.get(name) if isinstance(dtype, Mapping) else dtype
    return None if found is None else name_of(found)


def _text(shape: Iterable[int] | None) -> str:
    return "None" if shape is None else str(list(shape))


def _dtypes(noun: str, given: Any, faults: list[str]) -> Any:
    """The dtypes that a caller gave; None with a fault if one of them is no dtype."""
    for each in given.values() if isinstance(given, Mapping) else [given]:
        if not isinstance(each, torch.dtype | str | None):
            faults.append(f"{noun} is {quoted(each)}; give a dtype of torch, or some by name.")
            return None
    return given


def name_of(dtype: object) -> str:
    """The name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def _usable(
    given: Mapping[str, Any],
    noun: str,
    fault_of_one: Callable[[Any], str | None],
    faults: list[str],
) -> dict[str, Any]:
    """The tensors that can be used; for every other one, the reason is added to ``faults``."""
    found = {}
    for name, value in given.items():
        if value is None:
            continue
        fault = fault_of_one(value)
        if fault is None:
            found[name] = value
        else:
            faults.append(f"{noun} {name!r} {fault}" if name else f"{noun} {fault}")
    return found


def _apart(given: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """The error of tensors, by noun and name, that are not on one device, as a list."""
    first: tuple[str, str, Tensor] | None = None
    for noun, tensors in given.items():
        for name, tensor in tensors.items():
            first = first or (noun, name, tensor)
            if tensor.device != first[2].device:
                return [
                    f"{noun} {name!r} is on {tensor.device} and {first[0]} {first[1]!r} on "
                    f"{first[2].device}; use one device."
                ]
    return []


def _renamed(
    src: Mapping[str, Any], names: Callable[[str], Any] | None, faults: list[str]
) -> dict[str, str] | None:
    """The name in dst of every name of ``src``; if ``names`` fails, ``faults`` has the reason."""
    if names is None:
        return None
    found = {}
    for name in src:
        try:
            found[name] = names(name)
        except Exception as error:
            faults.append(f"names({name!r}) raises {quoted(error)}.")
            return None
        if not isinstance(found[name], str):
            faults.append(f"names({name!r}) is {quoted(found[name])}; give a text.")
            return None
    return found
