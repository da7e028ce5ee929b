"""Hosts: which of them are slower or faster than most, from the rates of pairs of hosts.

Bytes from one host to another pass the way out of the first and the way into the second::

    rate(a, b) = min(out[a], into[b])

So the best rate of a host over its partners is a lower bound of its own rate, and is its own rate
if a partner is at least as fast. ``next_pairs`` says which pairs to measure for that, few and
disjoint; ``compared`` solves for the hosts. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log, log2, sqrt
from statistics import median, median_high

from rvdcomm import Link, Network, Topology
from rvdcomm.network import Links, Node

Ranks = tuple[int, ...]

PairRates = Mapping[tuple[int, int], float]
"""Bytes a second from one host to another, by the indices of the two hosts."""

MIN_DIFFERENCE = 0.25
"""Rates within this share of each other count as equal, whatever the noise. A heuristic: what other
programs take from a host for seconds does not show as noise of repetitions."""

NUM_DEVIATIONS = 3
"""Rates whose quotient is within this many of its standard deviations count as equal."""

OUT, INTO, INSIDE = "out", "into", "inside"
"""What a rate is of: bytes that leave a host, that enter it, that move between its ranks."""


@dataclass(frozen=True, slots=True)
class Way:
    """How fast bytes go one way: as fast for most hosts, and otherwise for those that differ.

    Attributes:
        name: ``OUT``, ``INTO`` or ``INSIDE``.
        usual_bytes_per_sec: the rate of the median host.
        others: the hosts that differ by more than the measurement can err, with their rates.
    """

    name: str
    usual_bytes_per_sec: float
    others: tuple[tuple[int, float], ...] = ()

    def rate(self, host: int) -> float:
        """Bytes a second of a host."""
        return dict(self.others).get(host, self.usual_bytes_per_sec)


@dataclass(frozen=True, slots=True)
class SlowPair:
    """A pair whose rate is below what is ``expected`` of the two hosts, in bytes a second."""

    src: int
    dst: int
    bytes_per_sec: float
    expected_bytes_per_sec: float


@dataclass(frozen=True, slots=True)
class HostRates:
    """The rates of hosts.

    Attributes:
        hosts: the ranks of each host.
        ways: rates by what was measured.
        unsure: pairs of which one host is slow, and no other pair tells which; ``ways`` lists both.
        slow_paths: pairs that are slower than both hosts are with others.
    """

    hosts: tuple[Ranks, ...] = ()
    ways: tuple[Way, ...] = ()
    unsure: tuple[SlowPair, ...] = ()
    slow_paths: tuple[SlowPair, ...] = ()

    @property
    def are_equal(self) -> bool:
        """Whether no host differs from the others."""
        return not any(way.others for way in self.ways)

    def is_unsure(self, way: Way, host: int) -> bool:
        """Whether the rate of a host may be that of another host."""
        return any(host == {OUT: pair.src, INTO: pair.dst}.get(way.name) for pair in self.unsure)


ALL_EQUAL = HostRates()
"""The rates where no hosts are compared."""


# --- which pairs to measure --------------------------------------------------------------------


def next_pairs(hosts: Sequence[int], known: PairRates) -> tuple[tuple[int, int], ...]:
    """Disjoint pairs of ``hosts`` to measure next, in both directions; none when all is known.

    First come rounds of a tournament, about the logarithm of the number of hosts. Then each host
    that seems slow meets one of the fastest quarter, unless it has: its partners may all have been
    slow. That takes three rounds at most.

    >>> next_pairs(range(4), {})
    ((1, 2), (0, 3))
    """
    for i in range(_num_rounds(len(hosts))):
        if not known.keys() >= set(pairs := _tournament(hosts, i)):
            return pairs
    among = {pair: rate for pair, rate in known.items() if pair[0] in hosts}
    slow = {
        host
        for rates in _best(among)
        for host, rate in rates.items()
        if rate * (1 + MIN_DIFFERENCE) < sorted(rates.values())[-1 - len(rates) // 4]
    }
    others = [host for host in hosts if host not in slow]
    unmet = [host for host in sorted(slow) if not any((host, other) in among for other in others)]
    return tuple(zip(unmet, others, strict=False))


def _num_rounds(num_hosts: int) -> int:
    return min(num_hosts - 1 + num_hosts % 2, 1 + ceil(log2(num_hosts)))


def _tournament(hosts: Sequence[int], i: int) -> tuple[tuple[int, int], ...]:
    """Round ``i`` of the circle method: over all rounds every host meets every other once.

    One host of an odd number rests; of an even number, it meets the last.
    """
    ring = hosts if len(hosts) % 2 else hosts[:-1]
    n = len(ring)
    pairs = [(ring[(i + j) % n], ring[(i - j) % n]) for j in range(1, (n + 1) // 2)]
    return (*pairs, *((ring[i], host) for host in hosts[n:]))


# --- what the rates say ------------------------------------------------------------------------


def compared(
    hosts: tuple[Ranks, ...],
    pairs: PairRates,
    inside: Mapping[str, Mapping[int, float]] | None = None,
    *,
    pair_noise: float = 0.0,
    inside_noise: float = 0.0,
) -> HostRates:
    """The rates of hosts from those of pairs.

    Args:
        hosts: the ranks of each host.
        pairs: measured rates between hosts, in bytes a second.
        inside: measured rates between the ranks of each host, by the kind of transfer.
        pair_noise, inside_noise: relative deviation of a measured rate when it is repeated.
    """
    found = _between(hosts, pairs, pair_noise) if pairs else HostRates(hosts)
    return replace(found, ways=(*found.ways, *_inside(inside, inside_noise))) if inside else found


def _between(hosts: tuple[Ranks, ...], pairs: PairRates, noise: float) -> HostRates:
    out, into = _best(pairs)
    limits = {(a, b): min(out[a], into[b]) for a, b in pairs}
    tolerance = _tolerance(noise, [rate / limits[pair] for pair, rate in pairs.items()])
    sent, received = ways = _ways({OUT: out, INTO: into}, tolerance)
    slow_paths = (
        SlowPair(*pair, rate, limits[pair])
        for pair, rate in sorted(pairs.items())
        # Twice, because pairs are many, and the limit is the best of several rates.
        if log(limits[pair] / rate) > 2 * tolerance
    )
    return HostRates(
        hosts, ways, tuple(_unsure(sent, received, pairs, tolerance)), tuple(slow_paths)
    )


def _inside(inside: Mapping[str, Mapping[int, float]], noise: float) -> tuple[Way, ...]:
    """The rates inside hosts: a host differs only by what it differs in all kinds of transfers."""
    middles = {kind: median_high(rates.values()) for kind, rates in inside.items()}
    shares = {
        host: [rates[host] / middles[kind] for kind, rates in inside.items() if host in rates]
        for host in sorted({host for rates in inside.values() for host in rates})
    }
    usual = median(middles.values())
    nearest = {host: usual * min(of, key=_distance) for host, of in shares.items()}
    tolerance = _tolerance(noise, [min(of) / max(of) for of in shares.values()])
    return _ways({INSIDE: nearest}, tolerance)


def _best(pairs: PairRates) -> tuple[dict[int, float], dict[int, float]]:
    """The best rate of each host over its partners, out of it and into it."""
    out: dict[int, float] = {}
    into: dict[int, float] = {}
    for (src, dst), rate in pairs.items():
        out[src] = max(rate, out.get(src, 0.0))
        into[dst] = max(rate, into.get(dst, 0.0))
    return out, into


def _tolerance(noise: float, shares: Iterable[float]) -> float:
    """The distance up to which two rates count as equal.

    ``shares`` are rates as shares of the best of their host: they show how much rates vary, too.
    """
    # The logarithm of a quotient of two rates varies by root 2 of what that of one does.
    deviation = sqrt(2) * max(noise, 1 - median(shares))
    return max(log(1 + MIN_DIFFERENCE), NUM_DEVIATIONS * deviation)


def _distance(quotient: float) -> float:
    """How far a quotient is from 1, up or down."""
    return abs(log(quotient))


def _ways(rates: Mapping[str, Mapping[int, float]], tolerance: float) -> tuple[Way, ...]:
    """Ways of one usual rate: bytes between usual hosts leave one and enter another."""
    # Of two halves the faster is usual: one slow host of two is slow, and not the other fast.
    middle = median_high(rate for of in rates.values() for rate in of.values())
    others = {
        name: {host: of[host] for host in sorted(of) if _distance(of[host] / middle) > tolerance}
        for name, of in rates.items()
    }
    usual = median(
        rate for name, of in rates.items() for host, rate in of.items() if host not in others[name]
    )
    return tuple(Way(name, usual, tuple(of.items())) for name, of in others.items())


def _unsure(out: Way, into: Way, pairs: PairRates, tolerance: float) -> Iterator[SlowPair]:
    """Slow pairs of two hosts that are slow with all their partners."""

    def is_slow(rate: float, other: float) -> bool:
        return log(other / rate) > tolerance

    # A host is slow by itself if it is slow with a partner that is not.
    proved = {
        *((OUT, a) for (a, b), rate in pairs.items() if is_slow(rate, into.rate(b))),
        *((INTO, b) for (a, b), rate in pairs.items() if is_slow(rate, out.rate(a))),
    }
    usual = out.usual_bytes_per_sec
    for (a, b), rate in sorted(pairs.items()):
        if is_slow(rate, usual) and not {(OUT, a), (INTO, b)} & proved:
            yield SlowPair(a, b, rate, usual)


# --- as a network ------------------------------------------------------------------------------


def with_rates(topology: Topology, rates: HostRates) -> Links:
    """A topology whose hosts have these rates: itself if no host differs, and a network otherwise.

    Alphas stay those of the levels, which have the hosts as groups. Links are rounded to four
    digits, more than are measured, so that equal ones share a line of the network's text.
    """
    if rates.are_equal:
        return topology
    network = Network.of(topology)
    nodes = _nodes(topology, network, rates.hosts)
    found = {
        ends: way.rate(host)
        for way in rates.ways
        for host, ranks in enumerate(rates.hosts)
        for port in (ranks if way.name == INSIDE else nodes[host : host + 1])
        for ends in _ends(way.name, port, network)
    }
    return Network(
        tuple(
            replace(
                wire,
                link=Link(
                    _rounded(wire.link.alpha_secs),
                    _rounded(found.get((wire.src, wire.dst), wire.link.bytes_per_sec)),
                ),
            )
            for wire in network.wires
        )
    )


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def _nodes(topology: Topology, network: Network, hosts: tuple[Ranks, ...]) -> list[Node]:
    """The node of each host: its switch, or its rank if all hosts have one."""
    nodes: list[Node] = [ranks[0] for ranks in hosts]
    for level in topology.levels:
        if set(level.groups) == set(hosts):
            break
        nodes = [network.above[node] for node in nodes]
    return nodes


def _ends(way: str, port: Node, network: Network) -> Iterator[tuple[Node, Node]]:
    """The wires of a port that bytes pass one way, by their ends."""
    above = network.above[port]
    if way != INTO:
        yield port, above
    if way != OUT:
        yield above, port
