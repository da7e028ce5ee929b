"""Texts: all readers of untrusted texts, with their documented errors and checked properties."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import rvdcomm as rv
from rvdcomm.errors import CommError, LayoutError, ProgramError
from rvdcomm.layout import RVD, Box, parse_ranges, ranges_text
from rvdcomm.plans import simulate_program
from rvdcomm.program import Program
from rvdcomm.program.lower import lower
from rvdcomm.program.verify import verify
from rvdcomm.run import TransitionRequest, read_post
from rvdcomm.units import parse_bytes
from tests.fuzz.draw import NUMPY_DTYPES, STORED_AS, draw
from tests.oracle import data_faults, parts_of, shards_of
from tests.program.test_verify import GOOD

MAX_SIMULATED_BYTES = 1 << 20


@dataclass(frozen=True)
class Target:
    """A reader: ``check`` reads a text and returns the outcome; it raises if a property fails.

    ``errors`` are the errors that the reader may raise; ``samples`` yields valid texts.
    """

    check: Callable[[str], str]
    errors: tuple[type[Exception], ...]
    samples: Callable[[random.Random], Iterator[str]]

    def outcome(self, text: str) -> str:
        """``"refused"`` if the reader refuses the text, otherwise the outcome of ``check``."""
        try:
            return self.check(text)
        except self.errors as error:
            if len(str(error)) > MAX_ERROR_CHARS:
                raise AssertionError(f"an error of {len(str(error))} characters") from error
            return "refused"


MAX_ERROR_CHARS = 5000
"""Limit of the length of an error message; a message must not repeat a long text."""


# --- properties ---------------------------------------------------------------------------------


def check_layout(text: str) -> str:
    found = rv.Layout.parse(text)
    assert rv.Layout.parse(str(found)) == found, f"{found} reads back otherwise"
    return "read"


def check_rvd(text: str) -> str:
    assert RVD.parse(str(RVD.parse(text))) == RVD.parse(text), "it reads back otherwise"
    return "read"


def check_box(text: str) -> str:
    assert Box.parse(str(Box.parse(text))) == Box.parse(text), "it reads back otherwise"
    return "read"


def check_ranges(text: str) -> str:
    found = parse_ranges(text)
    assert not found or parse_ranges(ranges_text(found)) == found, "it reads back otherwise"
    return "read"


def check_bytes(text: str) -> str:
    assert parse_bytes(text) >= 0
    return "read"


def check_program(text: str) -> str:
    """A program that the verifier accepts must simulate to the right data."""
    program = Program.parse(text)
    assert Program.parse(str(program)) == program, "it reads back to another program"
    try:
        verify(program)
    except ProgramError:
        return "read, not proved"
    num_elements = sum(b.num_elements for b in program.buffers) + len(program.ranks)
    num_elements += program.src.rvd.v * Box.of_shape(program.src.shape).num_elements
    if num_elements * program.item_bytes > MAX_SIMULATED_BYTES or program.dtype == "complex32":
        return "proved, too large to simulate"
    if program.src.rvd.v > 1 and program.dtype in STORED_AS:
        return "proved, numpy does not sum its dtype"
    dtype = STORED_AS.get(program.dtype, program.dtype)
    # A sum of many parts may overflow int8 or float16; this is not a fault of the program.
    if program.src.rvd.v > 16:
        return "proved, too many parts to sum"
    parts = parts_of(program.src, dtype)
    shards = simulate_program(program, shards_of(program.src, parts)).shards
    faults = data_faults(program.dst, shards, parts)
    assert not faults, f"proved, but the simulated data is wrong: {faults}"
    return "proved, and simulates to the right data"


def check_topology(text: str) -> str:
    path = _scratch() / "topology.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    found = rv.Topology.load(path)
    found.save(path)
    assert rv.Topology.load(path) == found, "it reads back otherwise"
    return "read"


def check_request(text: str) -> str:
    found = TransitionRequest.from_json(read_post(text.encode("utf-8", "surrogatepass")))
    assert TransitionRequest.from_json(json.loads(json.dumps(found.to_json()))) == found
    return "read"


@cache
def _scratch() -> Path:
    """A temporary folder of this process."""
    folder = tempfile.mkdtemp(prefix="rvdcomm-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


# --- samples ------------------------------------------------------------------------------------


def layout_samples(rng: random.Random) -> Iterator[str]:
    while True:
        yield str(draw(rng.randrange(2**32), 0).src)


def rvd_samples(rng: random.Random) -> Iterator[str]:
    for text in layout_samples(rng):
        yield text.split(" ")[0]


def box_samples(rng: random.Random) -> Iterator[str]:
    while True:
        layout = draw(rng.randrange(2**32), 0).src
        yield str(layout.cell(rng.choice(layout.ranks)).box)


def ranges_samples(rng: random.Random) -> Iterator[str]:
    while True:
        yield ranges_text(draw(rng.randrange(2**32), 0).src.ranks)


def bytes_samples(rng: random.Random) -> Iterator[str]:
    while True:
        yield rng.choice(["4096", "64MiB", "1.5 KB", "1e6", "2.25e3GiB"])


def program_samples(rng: random.Random) -> Iterator[str]:
    """Small programs, and programs of random plans, also with shared-memory domains and slices."""
    while True:
        if rng.random() < 0.3:
            yield rng.choice(list(GOOD.values()))
            continue
        case = draw(rng.randrange(2**32), 0, num_ranks=4, dtypes=NUMPY_DTYPES)
        plan = rv.plan(case.src, case.dst, case.dtype, case.topology)
        slices = max(1, case.num_slices)
        yield str(
            lower(plan.path, plan.dtype, plan.topology, domains=case.domains, num_slices=slices)
        )


def topology_samples(rng: random.Random) -> Iterator[str]:
    while True:
        topology = draw(rng.randrange(2**32), 0).topology
        if topology is not None:
            topology.save(_scratch() / "sample.json")
            yield (_scratch() / "sample.json").read_text()


def request_samples(rng: random.Random) -> Iterator[str]:
    while True:
        case = draw(rng.randrange(2**32), 0)
        shape = case.src.shape
        made = TransitionRequest(
            str(case.src), str(case.dst), shape, None, shape, None, (case.dtype,)
        )
        yield json.dumps(made.to_json())


TARGETS = {
    "layout": Target(check_layout, (LayoutError,), layout_samples),
    "rvd": Target(check_rvd, (LayoutError,), rvd_samples),
    "box": Target(check_box, (LayoutError,), box_samples),
    "ranges": Target(check_ranges, (LayoutError,), ranges_samples),
    "bytes": Target(check_bytes, (ValueError,), bytes_samples),
    "program": Target(check_program, (ProgramError,), program_samples),
    "topology": Target(check_topology, (LayoutError,), topology_samples),
    "request": Target(check_request, (CommError, ValueError), request_samples),
}

WEIGHTS: Sequence[int] = (3, 1, 1, 1, 1, 8, 3, 2)
"""Weights with which targets are drawn; programs, which allow most kinds of faults, weigh most."""
