"""Views: the loops that the dims before and after a reshape have in common."""

from __future__ import annotations

from itertools import chain, count
from math import gcd

from superscaler_core.errors import AnnotationError
from superscaler_core.rules.call import names


def view_annotation(src: tuple[int, ...], dst: tuple[int, ...]) -> tuple[str, dict[str, int]]:
    """The annotation of a reshape, and the sizes of its loops.

    Both shapes are read from the outermost dim as mixed-radix numbers. A loop that both shapes have
    gets one name; where the radices have no common factor, the remaining dims cannot be cut.

    Raises:
        AnnotationError: the shapes have different numbers of elements, or no elements.

    >>> view_annotation((2, 5, 12), (2, 5, 4, 3))
    ('b s (h d) -> b s h d', {'b': 2, 's': 5, 'h': 4, 'd': 3})
    >>> view_annotation((6, 4), (4, 6))
    ('(b s^) h^ -> (b d^) e^', {'b': 2, 's': 3, 'h': 4, 'd': 2, 'e': 6})
    """
    fresh = chain(names(8), (f"d{i}" for i in count(8)))
    sizes: dict[str, int] = {}
    left: list[list[str]] = [[] for _ in src]
    right: list[list[str]] = [[] for _ in dst]
    for src_dims, dst_dims in _groups(src, dst):
        rest_src, rest_dst = [src[d] for d in src_dims], [dst[d] for d in dst_dims]
        i = j = 0
        while i < len(rest_src) and j < len(rest_dst):
            common = gcd(rest_src[i], rest_dst[j])
            if common > 1:
                name = next(fresh)
                sizes[name] = common
                left[src_dims[i]].append(name)
                right[dst_dims[j]].append(name)
            rest_src[i] //= common
            rest_dst[j] //= common
            if rest_src[i] > 1 and rest_dst[j] > 1:
                break
            i, j = i + (rest_src[i] == 1), j + (rest_dst[j] == 1)
        for loops, dims, rest in ((left, src_dims, rest_src), (right, dst_dims, rest_dst)):
            for at, size in zip(dims, rest, strict=True):
                if size > 1:
                    name = next(fresh)
                    sizes[name] = size
                    loops[at].append(f"{name}^")
    return f"{_text(left)} -> {_text(right)}", sizes


def _groups(src: tuple[int, ...], dst: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Groups of dims, without those of size 1, with equal numbers of elements on both sides."""
    total_src = total_dst = 1
    made: list[tuple[list[int], list[int]]] = []
    group: tuple[list[int], list[int]] = ([], [])
    rest_dst = [d for d, size in enumerate(dst) if size != 1]
    for d in (d for d, size in enumerate(src) if size != 1):
        group[0].append(d)
        total_src *= src[d]
        while rest_dst and total_dst < total_src:
            group[1].append(rest_dst[0])
            total_dst *= dst[rest_dst.pop(0)]
        if total_src == total_dst:
            made.append(group)
            group = ([], [])
    if group != ([], []) or rest_dst or 0 in (total_src, total_dst):
        raise AnnotationError(f"a tensor of shape {list(src)} has no view of shape {list(dst)}.")
    return made


def _text(dims: list[list[str]]) -> str:
    words = ("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims)
    return " ".join(words) or "()"
