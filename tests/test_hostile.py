"""Hostile texts are rejected with a message, in bounded time and memory.

The command line reads files that others wrote. It runs in a process with limited memory.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import socket
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

import rvdcomm as rv
from rvdcomm.errors import CommError, LayoutError, ProgramError
from rvdcomm.layout import MAX_DIMS, MAX_RANK, MAX_RANKS, Box, parse_ranges
from rvdcomm.program import MAX_SYMBOLS, MAX_TEXT_BOXES, Program
from rvdcomm.program.verify import verify
from rvdcomm.run import SocketChannel, TransitionRequest, read_post, unix_socket
from rvdcomm.text import MAX_INTEGER, integer, quoted
from tests.program.test_verify import GATHER, MASK, REDUCE, SUM

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rvdcomm"
DIGITS = "9" * 100_000

# --- numbers and quotes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", " 1", "1 ", "+1", "-1", "1_0", "1.0", "1e3", "0x1", "٣", "１", "²", "1\n", DIGITS]
)
def test_integer_rejects_text_that_is_no_64_bit_ascii_number(text: str) -> None:
    with pytest.raises(LayoutError, match=r"invalid literal .*: expected a number from 0 to"):
        integer(text)


def test_integer_accepts_numbers_up_to_64_bits() -> None:
    assert integer(str(MAX_INTEGER)) == MAX_INTEGER
    with pytest.raises(LayoutError, match="invalid literal '9223372036854775808'"):
        integer(str(MAX_INTEGER + 1))


@pytest.mark.parametrize(
    "value", ["x" * 10**6, tuple(range(10**5)), [["x" * 999] * 99] * 9, 10**4000]
)
def test_quoted_values_are_shortened(value: object) -> None:
    assert len(quoted(value)) < 5000
    assert "..." in quoted(value)


# --- layouts ------------------------------------------------------------------------------------

LAYOUTS = {
    "many ranks": ("R(999999999999)V(1)D(1) shape(4)", "needs 999999999999 ranks"),
    "many splits": ("R(1)V(1)D(999999999999) shape(4)", "needs 999999999999 ranks"),
    "many runs": (f"R(1)V(1)D(2) shape(4) ranks({'0:1000000,' * 1000}0)", "are more than 1048576"),
    "a rank beyond 32 bits": ("R(1)V(1)D(1) shape(4) ranks(2147483648)", "above 2147483647"),
    "digits of a count": (f"R({DIGITS})V(1)D(1) shape(4)", "expected a number from 0"),
    "digits of a size": (f"R(1)V(1)D(1) shape({DIGITS})", "cannot parse layout"),
    "digits of a cut": (f"R(1)V(1)D(1) shape(4) cuts(0,{DIGITS})", "cannot parse layout"),
    "many cut points": (f"R(1)V(1)D(2) shape(4) cuts({'0,' * 2 * MAX_RANKS}4)", "cannot parse"),
    "many dims": (f"R(1)V(1)D({'1,' * 9999}1) shape({'1,' * 9999}1)", r"expected '\)'"),
    "one dim too many": (f"R(1)V(1)D({'1,' * 63}1) shape({'1,' * 63}1)", r"expected '\)'"),
    "many sizes": (f"R(1)V(1)D(1) shape({'1,' * 10**6}1)", "cannot parse layout"),
    "more elements than 64 bits": (
        "R(1)V(1)D(1,1) shape(4611686018427387904,4)",
        r"shape \(4611686018427387904, 4\) has more than 9223372036854775807 elements",
    ),
    "Arabic digits": ("R(٢)V(1)D(1) shape(4)", "expected a count at column 3"),
    "a NUL": ("R(1)V(1)D(1) shape(4)\0", "cannot parse layout"),
    "a megabyte": ("x" * 10**6, "cannot parse layout"),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_hostile_layouts_are_rejected_with_a_short_message(what: str) -> None:
    text, match = LAYOUTS[what]
    with pytest.raises(LayoutError, match=match) as raised:
        rv.Layout.parse(text)
    assert len(str(raised.value)) < 2000


def test_layout_with_the_most_dims_is_planned_and_verified() -> None:
    shape = (2,) * 2 + (1,) * (MAX_DIMS - 2)
    ones = ",".join(["1"] * (MAX_DIMS - 2))
    src, dst = (
        rv.Layout(shape, f"R(1)V(1)D(2,1,{ones})"),
        rv.Layout(shape, f"R(1)V(1)D(1,2,{ones})"),
    )
    plan = rv.plan(src, dst)
    plan.verify()
    assert rv.Layout.parse(str(src)) == src
    with pytest.raises(LayoutError, match="a tensor has at most 63"):
        rv.RVD(1, 1, (1,) * (MAX_DIMS + 1))


def test_layout_of_100_000_ranks_survives_a_text_round_trip() -> None:
    layout = rv.Layout((10**6,), "R(1)V(1)D(100000)")
    assert str(layout) == "R(1)V(1)D(100000) shape(1000000) ranks(0:100000)"
    assert rv.Layout.parse(str(layout)) == layout
    assert layout.span == range(100_000)


def test_layout_with_too_many_ranks_is_rejected_before_it_is_built() -> None:
    with pytest.raises(LayoutError, match="a layout has at most 1048576"):
        rv.Layout((4,), rv.RVD(10**18, 10**18, (1,)))


def test_largest_rank_of_32_bits_can_be_planned() -> None:
    src = rv.Layout((4,), "R(1)V(1)D(2)", [0, MAX_RANK])
    rv.plan(src, rv.Layout((4,), "R(2)V(1)D(1)", [0, MAX_RANK])).verify()


def test_parse_ranges_rejects_more_ranks_than_its_limit() -> None:
    assert parse_ranges("0:4,9", 5) == (0, 1, 2, 3, 9)
    with pytest.raises(LayoutError, match="ranks '0:4,9' are more than 4"):
        parse_ranges("0:4,9", 4)


@pytest.mark.parametrize(
    "text", [f"[0:{DIGITS}]", f"[{'0:1,' * 10**6}0:1]", "[0:9999999999999999999]"]
)
def test_hostile_boxes_are_rejected(text: str) -> None:
    with pytest.raises(LayoutError, match="cannot parse box"):
        Box.parse(text)


# --- inconsistent programs ----------------------------------------------------------------------

DOUBLINGS = "".join("add rank 0 dst dst: [0:4]@0>0\n" for _ in range(32))
LIES = {
    "a buffer of a stranger": (
        MASK + "buffer s1 rank 7: [0:4]\n",
        "buffer s1: rank 7 is in neither layout",
    ),
    "a way through a stranger": (
        SUM.replace("buffer r1 rank 0", "buffer s1 rank 7: [0:2]\nbuffer r1 rank 0"),
        "rank 7 is in neither layout",
    ),
    "a shard outside its layout": (
        GATHER.replace("dst R(2)V(1)D(1,1) shape(4,6) ranks(3,5)",
                       "dst R(3)V(1)D(1,1) shape(4,6) ranks(3,5,6)")
        + "buffer src rank 6: [0:4,0:6]\n",
        "buffer src of rank 6, which is not in src",
    ),
    "a buffer called none": (MASK + "buffer - rank 0: [0:4]\n", "which means none"),
    "another number of dims": (MASK + "buffer s1 rank 0: [0:4,0:1]\n", "has 2 dims, the tensor"),
    "another shape": (
        MASK.replace("dst R(1)V(2)D(1) shape(4)", "dst R(1)V(2)D(1) shape(5)"),
        r"src has the shape \(4,\), dst \(5,\)",
    ),
    "parts without a sum": (MASK.replace("int64", "bool"), "bool values cannot be summed"),
    "a sum of nowhere": (
        REDUCE.replace("ranks 0,1 dst,dst dst,dst", "ranks 0,1 -,- -,-"),
        "every rank has to name a buffer",
    ),
    "a gather of other pieces": (
        """\
program int64
src R(1)V(1)D(2) shape(4) ranks(0,1)
dst R(2)V(1)D(1) shape(4) ranks(0,1)
buffer src rank 0: [0:2]
buffer src rank 1: [2:4]
buffer s rank 0: [0:2] [0:2]
buffer dst rank 0: [0:4]
buffer dst rank 1: [0:4]
copy rank 0 src s: [0:2]@0>0 [0:2]@0>1
collective all_gather step 0 ranks 0,1 s,src dst,dst
  0->0: [0:2]@0>0
  0->1: [0:2]@1>0
  1->0: [2:4]@0>0
  1->1: [2:4]@0>0
""",
        "all_gather: rank 0 sends different boxes",
    ),
    # A sum of 2**32 + 1 copies of one part: a counter of 32 bits would overflow to 1.
    "sums that overflow": (
        """\
program int64
src R(2)V(1)D(1) shape(4) ranks(0,1)
dst R(2)V(1)D(1) shape(4) ranks(0,1)
buffer src rank 0: [0:4]
buffer src rank 1: [0:4]
buffer dst rank 0: [0:4]
buffer dst rank 1: [0:4]
copy rank 0 src dst: [0:4]@0>0
"""
        + DOUBLINGS
        + "add rank 0 src dst: [0:4]@0>0\n"
        + "copy rank 1 src dst: [0:4]@0>0\n",
        "replicas but differ|is added 1000 times",
    ),
    "a copy of no boxes to nowhere": (
        MASK + "copy rank 0 src s9: \n",
        "instruction 2: rank 0 has no buffer s9",
    ),
    "a remote copy to a stranger": (
        MASK.replace("copy rank 0 src dst: [0:4]@0>0", "copy rank 9 src dst: [0:4]@0>0"),
        "rank 9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LIES)
def test_inconsistent_program_is_not_proved(what: str) -> None:
    text, match = LIES[what]
    lines = text.splitlines()
    # Buffers come before instructions.
    head, rest = lines[:3], sorted(lines[3:], key=lambda line: not line.startswith("buffer"))
    with pytest.raises(ProgramError, match=match):
        verify(Program.parse("\n".join(head + rest)))


def test_program_too_large_to_prove_raises_program_error() -> None:
    points = " ".join(f"[{i}:{i + 1},{i}:{i + 1},{i}:{i + 1}]@0>0" for i in range(600))
    head = "R(1)V(1)D(1,1,1) shape(600,600,600) ranks(0)"
    text = (
        f"program int8\nsrc {head}\ndst {head}\nbuffer src rank 0: [0:600,0:600,0:600]\n"
        f"buffer dst rank 0: [0:600,0:600,0:600]\ncopy rank 0 src dst: {points}\n"
    )
    with pytest.raises(ProgramError, match=f"too large to prove: .*, at most {MAX_SYMBOLS}"):
        verify(Program.parse(text))


# --- files, on the command line -----------------------------------------------------------------

MEMORY_BYTES = 500 << 20
# Most files take less than 0.1 s. A text of a million ranks or boxes takes proportionally longer.
CPU_SECS = 10.0
HEAD = "\n".join(SUM.splitlines()[:3]) + "\n"
HUGE = "R(1)V(1)D(1) shape(4611686018427387904)"
FILES = {
    "empty": "",
    "truncated": SUM[:-9],
    "another version": SUM.replace("program int64", "program 2 int64"),
    "a NUL": HEAD + "buffer s\0 rank 0: [0:2]\n",
    "Arabic digits": SUM.replace("rank 1", "rank ١"),
    "digits": HEAD + f"buffer src rank {DIGITS}: [0:2]\n",
    "a huge step": SUM.replace("step 0", f"step {10**18}").replace("0->1: [2:4]", "0->1: [1:4]"),
    "negative ranks": SUM.replace("rank 1", "rank -1"),
    "a negative box": SUM.replace("[0:4]", "[-2:4]"),
    "messages of strangers": SUM.replace("0->1", "0->9"),
    "many ranks": "program int8\nsrc R(1)V(1)D(1) shape(4) ranks(0:1000000000000)\n",
    "many groups": HEAD + "collective all_to_all step 0 ranks 0:1048576 - -\n" * 1000,
    "many names": HEAD + f"collective all_to_all step 0 ranks 0:2 {'a,' * 10**6}a b\n",
    "many lines": "\n" * 5_000_000,
    "many boxes": HEAD + "buffer src rank 0:" + " [0:2]" * (MAX_TEXT_BOXES + 1),
    "many spaces": HEAD + "buffer" + " " * 5_000_000,
    "a dtype of megabytes": "program " + "x" * 5_000_000,
    "a million ranks": "program int8\n" + 2 * "".join(
        f"{side} R(1)V(1)D(1048576) shape(4) ranks(0:1048576)\n" for side in ("src", "dst")
    ),
    "2**62 elements": f"program int8\nsrc {HUGE}\ndst {HUGE}\n"
    f"buffer src rank 0: [0:{2**62}]\nbuffer dst rank 0: [0:{2**62}]\n",
}  # fmt: skip


VERIFY_ALL = """
import contextlib, io, json, pathlib, sys, time
from rvdcomm.cli import main

found = {}
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    start, errors = time.process_time(), io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(["verify", "--program-file", str(path)])
    found[path.name] = status, errors.getvalue(), time.process_time() - start
print(json.dumps(found))
"""
"""One process verifies all files, so its memory limit applies to each of them."""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, float]]:
    """Status, standard error and CPU time of ``rvdcomm verify --program-file`` for every file."""
    folder = tmp_path_factory.mktemp("hostile")
    for i, text in enumerate(FILES.values()):
        (folder / f"{i:03}").write_text(text, encoding="utf-8")
    done = run_within_limits("-c", VERIFY_ALL, str(folder))
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(FILES, json.loads(done.stdout).values(), strict=True))


def rvdcomm_within_limits(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line with little memory."""
    return run_within_limits("-m", "rvdcomm", *words)


def run_within_limits(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with little memory."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    # A thread of OpenBLAS reserves memory that it never uses.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words],
        check=False, capture_output=True, text=True, timeout=110, env=environment, preexec_fn=limit,
    )  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_hostile_programs_are_rejected_in_bounded_time_and_memory(
    verdicts: dict[str, tuple[int, str, float]], what: str
) -> None:
    status, error, cpu_secs = verdicts[what]
    # A file without any text is rejected before it is parsed as a program.
    is_read = what not in ("empty", "many lines")
    assert status == (1 if is_read else 2)
    assert error.startswith("rvdcomm: not proved: " if is_read else "rvdcomm: error: ")
    assert error.count("\n") == 1
    assert len(error) < 2000
    assert cpu_secs < CPU_SECS


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"\x80\x04\x95"], ids=["binary", "a pickle"])
def test_binary_files_are_rejected(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "program.txt").write_bytes(data)
    done = rvdcomm_within_limits("verify", "--program-file", str(tmp_path / "program.txt"))
    assert done.returncode == 2
    assert "codec can't decode" in done.stderr


def test_endless_file_is_rejected() -> None:
    done = rvdcomm_within_limits("verify", "--program-file", "/dev/zero")
    assert done.returncode == 2
    assert "it is longer than 67108864 bytes" in done.stderr


@pytest.mark.parametrize(
    "option, value",
    [
        ("--shape", "9" * 5000),
        ("--shape", "9" * 19),
        ("--src-ranks", "0:999999999999"),
        ("--memory-limit", "1e999999999"),
        ("--hosts", "999999999x999999999"),
        ("--hosts", "0:999999999999"),
        ("--dtype", "x" * 100_000),
    ],
)
def test_hostile_arguments_are_rejected(option: str, value: str) -> None:
    given = ["--shape", "8"] if option != "--shape" else []
    words = ["plan", "R(1)V(1)D(2)", "R(2)V(1)D(1)", *given, option, value]
    done = rvdcomm_within_limits(*words)
    assert done.returncode == 2
    assert len(done.stderr) < 6000


# --- posts of other ranks -----------------------------------------------------------------------

GOOD_REQUEST = TransitionRequest("R(1)V(1)D(2)", "R(2)V(1)D(1)", (4,), None, (2,), None, ("int8",))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"null", b"[]", b"1e999", b"{", b"[" * 10**6, b'{"a":' * 10**5, b"cos\nos\n"],
    ids=["empty", "binary", "null", "list", "number", "cut", "deep", "deep objects", "pickle"],
)
def test_post_that_is_no_json_object_raises_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_post(data)


@pytest.mark.parametrize(
    "name, value",
    [
        ("src", 7),
        ("src", ["R(1)V(1)D(2)"]),
        ("shape", "4"),
        ("shape", [1.5]),
        ("shape", [[4]]),
        ("shard", {"0": 4}),
        ("dtypes", "int8"),
        ("dtypes", [8]),
        ("executor", None),
        ("misuse", 1),
        ("unknown", 1),
    ],
)
def test_request_with_an_invalid_entry_raises_comm_error(name: str, value: object) -> None:
    with pytest.raises(CommError, match=r"what a rank posted is no request: .* one version"):
        TransitionRequest.from_json({**GOOD_REQUEST.to_json(), name: value})


@pytest.mark.parametrize(
    "data", [b"\x80\x04\x95", b"[]", b"[" * 60_000], ids=["pickle", "list", "deep"]
)
def test_invalid_message_leaves_no_open_descriptor(data: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with unix_socket() as handed, theirs:
        before = len(os.listdir("/proc/self/fd"))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [handed.fileno()]))]
        theirs.sendmsg([data], rights)
        wire = SocketChannel(ours)
        with pytest.raises(ValueError, match=r"."):
            wire.receive(1.0, max_fds=1)
        assert len(os.listdir("/proc/self/fd")) == before
        wire.close()


# --- no source file unpickles or evaluates input ------------------------------------------------

FORBIDDEN = {
    *("eval", "exec", "compile", "__import__"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "pickle.*", "torch.load", "numpy.load"),
    *("import cPickle", "import dill", "import cloudpickle", "import marshal", "import shelve"),
    *(".all_gather_object", ".gather_object", ".broadcast_object_list", ".scatter_object_list"),
    *(".send_object_list", ".recv_object_list"),
}
"""Names that could run code from a file or another process. Writing a pickle is harmless."""

SOURCES = sorted(PACKAGE.rglob("*.py"))


def names_in(source: str) -> set[str]:
    """Names that a source imports and uses: ``import m``, ``m.f``, ``.f`` of any value, ``f``."""
    tree, found = ast.parse(source), set[str]()
    module_of: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            module_of |= {alias.asname or alias.name: alias.name for alias in node.names}
            found |= {f"import {alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"import {node.module}"}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base = ast.unparse(node.value)
            found |= {f".{node.attr}", f"{module_of.get(base, base)}.{node.attr}"}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(node.func.id)
    return found


def test_no_source_file_unpickles_or_evaluates_input() -> None:
    found = {path: names_in(path.read_text()) & FORBIDDEN for path in SOURCES}
    assert [(path, names) for path, names in found.items() if names] == []


@pytest.mark.parametrize(
    "source, name",
    [
        ("import pickle\npickle.loads(b'')", "pickle.loads"),
        ("import pickle as p\np.load(file)", "pickle.load"),
        ("from pickle import loads", "pickle.loads"),
        ("from pickle import *", "pickle.*"),
        ("import numpy as np\nnp.load('x')", "numpy.load"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from torch import load", "torch.load"),
        ("eval('1')", "eval"),
        ("dist.all_gather_object(a, b)", ".all_gather_object"),
    ],
)
def test_forbidden_names_are_detected(source: str, name: str) -> None:
    assert name in names_in(source) & FORBIDDEN


def test_harmless_names_are_not_reported() -> None:
    source = "import json, pickle, re\nre.compile('x')\njson.loads('1')\npickle.dumps(1)\n"
    assert names_in(source) & FORBIDDEN == set()
