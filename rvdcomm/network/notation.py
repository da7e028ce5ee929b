"""Notation: a network as lines for people, which parse back to an equal network.

    switch NAME [multicasts] [adds]
    NODES -> NODES   LATENCY  RATE
    NODES <-> NODES  LATENCY  RATE

``NODES`` is the name of a switch or ranks such as ``0:4,7``. A line stands for a wire from each
node on its left to each on its right, and with ``<->`` for those back. What follows ``#`` is left
out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction

from rvdcomm.errors import LayoutError
from rvdcomm.layout import parse_ranges, ranges_text
from rvdcomm.network.link import Link
from rvdcomm.network.network import MAX_WIRES, SWITCH_NAME, Network, Node, Switch, Wire
from rvdcomm.text import quoted

MAX_CHARS = 8 << 20
"""Longest text that is read."""

_NUMBER = r"(\d{1,30}(?:\.\d{1,30})?(?:[eE][+-]?\d{1,3})?|inf)"
_WIRES = re.compile(rf"(\S+) (<?->) (\S+) {_NUMBER} ?(s|ms|us|ns) {_NUMBER} ?(B|KB|MB|GB|TB)/s")
_SECS = {"s": 0, "ms": -3, "us": -6, "ns": -9}
_BYTES = {"B": 0, "KB": 3, "MB": 6, "GB": 9, "TB": 12}
_FLAGS = ("multicasts", "adds")


def text_of(network: Network) -> str:
    """The lines of a network; wires that are alike share a line."""
    lines = [
        " ".join(["switch", switch.name, *(flag for flag in _FLAGS if getattr(switch, flag))])
        for switch in network.switches
        if switch.multicasts or switch.adds
    ]
    # Wires there and back share a line, which begins with the node that comes first.
    seen: dict[tuple[str | None, Node, str, Link], list[Node]] = {}
    for wire in network.wires:
        both = network.link(wire.dst, wire.src) == wire.link
        if both and _comes_later(wire.src, wire.dst):
            continue
        arrow = "<->" if both else "->"
        # Ranks share the line of what they are wired to; a switch has a line of its own.
        owner = None if isinstance(wire.src, int) else wire.src
        seen.setdefault((owner, wire.dst, arrow, wire.link), []).append(wire.src)
    for (owner, dst, arrow, link), nodes in seen.items():
        left = _ranks_text(nodes) if owner is None else owner
        lines.append(f"{left} {arrow} {dst}  {_secs_text(link.alpha_secs)}  {rate_text(link)}")
    return "\n".join(lines)


def parse(text: str) -> Network:
    """The network that a text describes.

    Raises:
        LayoutError: the text has another form. The message names the line.
    """
    if len(text) > MAX_CHARS:
        raise LayoutError(f"a network of {len(text)} characters; at most {MAX_CHARS} are read.")
    wires: list[Wire] = []
    switches: list[Switch] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        try:
            if words[:1] == ["switch"]:
                switches.append(_switch_of(words))
            elif words:
                wires += _wires_of(" ".join(words), MAX_WIRES - len(wires))
        except LayoutError as error:
            raise LayoutError(f"line {number}: {error}") from None
    return Network(tuple(wires), tuple(switches))


def rate_text(link: Link) -> str:
    """The rate of a link, in the largest unit in which it is written without loss."""
    return _exact(link.bytes_per_sec, _BYTES, (12, 9, 6, 3, 0), "B") + "/s"


def _secs_text(secs: float) -> str:
    return _exact(secs, _SECS, (0, -3, -6, -9), "s")


def _exact(value: float, units: dict[str, int], order: tuple[int, ...], base: str) -> str:
    """A number of at least one unit with its unit; reading the text gives the number again."""
    if value == 0 or math.isinf(value):
        return f"{value:g} {base}"
    named = {power: unit for unit, power in units.items()}
    for power in order:
        number = f"{float(Fraction(repr(value)) / Fraction(10) ** power):.12g}"
        if float(number) >= 1 and _value(number, power) == value:
            return f"{number} {named[power]}"
    return f"{value!r} {base}"


def _value(number: str, power: int) -> float:
    if number == "inf":
        return math.inf
    try:
        return float(Fraction(number) * Fraction(10) ** power)
    except OverflowError:
        raise LayoutError(f"{quoted(number)} is too large; an unlimited rate is 'inf'.") from None


def _comes_later(src: Node, dst: Node) -> bool:
    """Whether a wire is the one back: to a rank from a switch, or to what comes before its src."""
    if isinstance(src, int) != isinstance(dst, int):
        return isinstance(src, str)
    return str(src) > str(dst) if isinstance(src, str) else src > int(dst)


def _ranks_text(nodes: Iterable[Node]) -> str:
    return ranges_text(tuple(node for node in nodes if isinstance(node, int)))


def _switch_of(words: list[str]) -> Switch:
    flags = words[2:]
    if len(words) < 2 or len(set(flags)) != len(flags) or not set(flags) <= set(_FLAGS):
        raise LayoutError(
            f"cannot parse {quoted(' '.join(words))}: expected the form 'switch NAME [multicasts] "
            "[adds]'."
        )
    return Switch(words[1], *(flag in flags for flag in _FLAGS))


def _wires_of(line: str, most: int) -> Iterator[Wire]:
    found = _WIRES.fullmatch(line)
    if found is None:
        raise LayoutError(
            f"cannot parse {quoted(line)}: expected a form such as '0:4 <-> host0  3 us  25 GB/s'."
        )
    left, arrow, right, alpha, alpha_unit, rate, rate_unit = found.groups()
    link = Link(_value(alpha, _SECS[alpha_unit]), _value(rate, _BYTES[rate_unit]))
    srcs, dsts = _nodes_of(left), _nodes_of(right)
    if len(srcs) * len(dsts) * 2 > most:
        raise LayoutError(
            f"{quoted(line)} stands for more wires than the {MAX_WIRES} of a network."
        )
    for src in srcs:
        for dst in dsts:
            # Ranks on both sides are wired to each other, and not to themselves.
            if src != dst:
                yield Wire(src, dst, link)
            if arrow == "<->" and src != dst and not (dst in srcs and src in dsts):
                yield Wire(dst, src, link)


def _nodes_of(text: str) -> tuple[Node, ...]:
    return (text,) if SWITCH_NAME.fullmatch(text) else parse_ranges(text)
