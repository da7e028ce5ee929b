"""Layouts: the ways to divide the devices among replicas, parts of a sample, and stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import Traits
from superscaler_core.planners.search.request import Request


def layouts_of(request: Request, traits: Traits) -> Iterator[Setting]:
    """A setting for every layout of a request's devices that the model allows."""
    for family, lay_out in LAYOUTS.items():
        for setting in lay_out(request, traits):
            yield replace(setting, family=family)


def powers(most: int) -> list[int]:
    """Powers of two up to a number, ascending."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _hybrid(request: Request, traits: Traits) -> Iterator[Setting]:
    num = len(request.devices)
    sides = [n for n in range(1, num + 1) if num % n == 0]
    for tp, pp in product(sides, sides):
        if num % (tp * pp) or (tp > 1 and not traits.has_features) or pp > traits.num_layers:
            continue
        yield Setting(dp=num // (tp * pp), tp=tp, pp=pp)


def _axial(request: Request, traits: Traits) -> Iterator[Setting]:
    num = len(request.devices)
    for pp, dp in product(powers(num), powers(num)) if traits.is_axial else ():
        if num % (pp * dp) == 0:
            yield Setting(dp=dp, tp=num // (pp * dp), pp=pp)


def _interlaced(request: Request, traits: Traits) -> Iterator[Setting]:
    num = len(request.devices)
    is_possible = traits.has_blocks and traits.has_lookups and traits.has_features
    for tp in powers(num // 2) if is_possible and not request.recycle else ():
        if num % tp == 0 and num // tp <= traits.num_layers:
            yield Setting(tp=tp, pp=num // tp, slack=1)


def _spatial(request: Request, traits: Traits) -> Iterator[Setting]:
    num = len(request.devices)
    for rows in powers(num)[1:] if traits.has_images and not request.recycle else ():
        if num % rows == 0:
            yield Setting(dp=num // rows, tp=rows)


LAYOUTS: dict[str, Callable[[Request, Traits], Iterator[Setting]]] = {
    "hybrid": _hybrid,
    "axial": _axial,
    "interlaced": _interlaced,
    "spatial": _spatial,
}
"""By family, the layouts of the devices; none if the model does not allow the family."""
