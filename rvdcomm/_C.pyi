from collections.abc import Sequence
from typing import Literal, NoReturn

from typing_extensions import Buffer

# --- checksum (csrc/include/rvdcomm/crc32c.h) -----------------------------------------------------

def crc32c(data: Buffer, value: int = 0) -> int:
    """The CRC32C of contiguous bytes that follow those whose CRC32C is ``value``."""

# --- digest (csrc/include/rvdcomm/digest.h) -------------------------------------------------------

def digest(
    address: int, word_bytes: int, sizes: Sequence[int], strides: Sequence[int], lo: Sequence[int]
) -> int:
    """The digest of a strided box of words whose first index in the whole tensor is ``lo``."""

# An island is a shared-memory domain: ranks of one machine that map each other's memory.

# --- signal: how the ranks of an island tell each other "done" (csrc/include/rvdcomm/signal.h) ----

HEADER_BYTES: int

def format_header(memory: Buffer) -> None:
    """Make writable memory a header; its owner does that before any other rank maps it."""

class PeerError(RuntimeError):
    """A rank of the island is lost; ranks are indices in the island."""

    kind: Literal["dead", "timeout", "failed", "elsewhere"]
    rank: int

class Signals:
    """The view that the rank at ``index`` has of all headers, whose memory it keeps alive."""

    def __init__(self, index: int, headers: Sequence[Buffer], lifelines: Sequence[int]) -> None: ...
    def advance(self) -> None:
        """Publish: all that this rank wrote before is seen by ranks that wait for the new count."""

    def count(self) -> int:
        """How often this rank advanced, modulo 2**32."""

    def begin(self, identity: int, location: int, timeout_secs: float) -> None:
        """Begin the next call; ``identity`` (64 bits) says what it does. Raises PeerError."""

    def location(self, peer: int, timeout_secs: float) -> int:
        """The ``location`` that ``peer`` gave in the present call; waits until it has begun it.

        Raises PeerError, also if the peer ended before it began the call.
        """

    def end(self, num_events: Sequence[int]) -> None:
        """End the call, in which rank i counts ``num_events[i]`` events.

        Data that were read in the call are valid once this has returned; raises PeerError.
        """

    def wait(self, peer: int, num_events: int, timeout_secs: float) -> None:
        """Return once ``peer`` has counted ``num_events`` events in the present call.

        0 stands for all events of earlier calls. Raises PeerError if the wait cannot succeed.
        """

    def fail(self) -> None:
        """Break the island: all ranks that wait, now or later, raise and name this one."""

    def check(self) -> None:
        """Raise PeerError if this rank or any other has failed."""

    def blame(self, kind: Literal["dead", "timeout", "failed", "elsewhere"], peer: int) -> NoReturn:
        """Break the island because of ``peer``, unless another rank has named the cause before."""

    def close(self) -> None:
        """Release the lifelines; later calls raise RuntimeError. Other ranks are not told."""

# --- copy: batches of strided boxes (csrc/include/rvdcomm/copy_program.h) -------------------------

has_cuda: bool
"""Whether this build has the CUDA engine."""

CopySide = tuple[int, str, int, Sequence[int]]
"""(buffer, dtype name, element offset, element strides)."""

class CopyProgram:
    """Ops ``(shape, dst, sources)``, run in order: ``dst[box] = convert(sum of the sources)``.

    An op without sources writes zeros, an op with one source copies, and an op with more sources
    adds them in their order; a source may be dst itself. Every addition is rounded to the dtype.
    With ``wide``, half types are summed in float32 and rounded once. Buffers that are
    ``read_soon`` are kept in the caches, however large they are.
    """

    def __init__(
        self,
        ops: Sequence[tuple[Sequence[int], CopySide, Sequence[CopySide]]],
        wide: bool = False,
        read_soon: Sequence[int] = (),
    ) -> None: ...
    def run(self, addresses: Sequence[int], num_threads: int = 1) -> None:
        """Run on the CPU, without the GIL; ``addresses[i]`` is where buffer i starts."""

    def run_cuda(self, addresses: Sequence[int], stream: int) -> None:
        """Queue on a CUDA stream of the current device; RuntimeError if built without CUDA."""

    @property
    def num_buffers(self) -> int: ...
    @property
    def num_bytes(self) -> int:
        """Bytes that one run writes."""

# --- search: the cheapest sequence of rebinds (csrc/include/rvdcomm/search.h) ---------------------

def cheapest_rebinds(
    src: Sequence[int],
    start: Sequence[int],
    dst: Sequence[int],
    units: Sequence[Sequence[int]],
    coarse_units: Sequence[Sequence[int]],
    is_thorough: bool,
    sizes: Sequence[int],
    levels: Sequence[int],
    digit_sizes: Sequence[int],
    blocks: Sequence[int],
    num_ranks: int,
    num_bytes: int,
    ticks_a_unit: Sequence[int],
    ticks_a_round: Sequence[int],
    max_coarse_successors: int,
    max_successors: int,
) -> tuple[int, list[tuple[int, ...]]]:
    """As ``rvdcomm.planning.search.search_states``: the ticks, and the states from src to dst."""

# --- stages: what a rank does between two calls of a backend (csrc/include/rvdcomm/stage.h) -------

class Stage:
    """Actions that run in order, in one native call.

    An action is (0, index of a copy program, 0), (1, index of a peer, events to wait for), or
    (2, 0, 0), which counts an event.
    """

    def __init__(
        self,
        programs: Sequence[CopyProgram],
        actions: Sequence[tuple[int, int, int]],
        num_shards: int,
    ) -> None: ...
    def bind(
        self,
        memory: Sequence[int],
        signals: Signals | None,
        timeout_secs: float,
    ) -> None:
        """Set the addresses of the buffers after the shards, and the island, for all later runs."""

    def run(self, shards: tuple[int, ...], num_threads: int) -> None:
        """Do all actions, with the addresses of the shards; raises PeerError."""

    def call(
        self, shards: tuple[int, ...], num_threads: int, identity: int, num_events: Sequence[int]
    ) -> None:
        """Run as one whole call of the island, between ``begin`` and ``end`` of its signals.

        Without an island this is the same as ``run``.
        """
