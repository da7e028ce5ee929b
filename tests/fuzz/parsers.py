"""Parsers: feed damaged texts to all readers.

A reader may raise only its documented errors, and must end within a limit of CPU time.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from rvdcomm.plans import clear_cache
from tests.fuzz.command import Report, parser
from tests.fuzz.mutate import mutated
from tests.fuzz.texts import TARGETS, WEIGHTS

CPU_SECS = 2.0
"""Limit per text, in CPU seconds of this process, so that other load does not matter."""

NUM_MUTANTS = 40
"""Damaged texts per sample; making a sample takes longer than damaging one."""


def main(words: Sequence[str] | None = None) -> int:
    made = parser(
        "parsers",
        "Feed damaged layouts, boxes, ranks, programs and JSON to everything that reads them. A\n"
        "program that is proved must simulate to the right data. Where atheris is installed\n"
        "(pip install atheris; Python 3.11 to 3.13), half of the time is guided by coverage.",
        "  python -m tests.fuzz.parsers --secs 300\n"
        "  python -m tests.fuzz.parsers --target program --seed 8 --secs 60\n"
        "  python -m tests.fuzz.parsers --target box --text '[0:1,0:'     one text again\n",
    )
    made.add_argument("--secs", type=float, default=300.0, help="how long (default 300)")
    made.add_argument("--target", choices=sorted(TARGETS), help="only this one")
    made.add_argument("--text", help="try this text alone, with --target; @FILE is its file")
    args = made.parse_args(words)
    if args.text is not None:
        if args.target is None:
            made.error("--text needs --target")
        is_file = args.text.startswith("@")
        text = _decoded(Path(args.text[1:]).read_bytes()) if is_file else args.text
        report = Report("one text")
        try_text(report, args.target, text)
        return report.print()
    is_guided = find_spec("atheris") is not None and args.target is None
    report = fuzz(args.seed, args.secs / 2 if is_guided else args.secs, args.target)
    if is_guided:
        run_guided(report, args.seed, args.secs / 2)
    else:
        report.counts["texts guided by coverage (atheris is not installed)"] = 0
    return report.print()


def fuzz(seed: int, secs: float, target: str | None = None) -> Report:
    """Try damaged texts for ``secs`` seconds."""
    report = Report("damaged texts")
    rng = random.Random(seed)
    samples = {name: each.samples(rng) for name, each in TARGETS.items()}
    bar = tqdm(total=round(secs), unit="s", disable=None, leave=False)
    while report.secs < secs:
        name = target or rng.choices(list(TARGETS), WEIGHTS)[0]
        text, other = next(samples[name]), next(samples[name])
        try_text(report, name, text)
        for _ in range(NUM_MUTANTS):
            try_text(report, name, mutated(rng, text, other))
        clear_cache()
        bar.update(int(report.secs) - bar.n)
    bar.close()
    return report


def run_guided(report: Report, seed: int, secs: float) -> None:
    """Let atheris choose the texts, in a process of its own, because atheris never returns."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "tests.fuzz.guided", folder, str(seed), str(round(secs))]
        done = subprocess.run(
            [sys.executable, *words], check=False, capture_output=True, text=True,
            timeout=secs + 120,
        )  # fmt: skip
        counts = Path(folder, "counts")
        if done.returncode or not counts.exists():
            report.findings.append(f"atheris ended with {done.returncode}: {done.stderr[-2000:]}")
        for line in counts.read_text().splitlines() if counts.exists() else []:
            count, _, name = line.partition(" ")
            report.counts[f"guided: {name}"] += int(count)
        report.findings += [path.read_text() for path in sorted(Path(folder).glob("finding-*"))]


def try_text(report: Report, name: str, text: str) -> None:
    """Try a text and count its outcome; a fault becomes a finding."""
    start = time.process_time()
    try:
        with limited(CPU_SECS):
            outcome = TARGETS[name].outcome(text)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        outcome = "FOUND"
        _note(report, f"{name}: {type(error).__name__} at {place}: {str(error)[:300]}", name, text)
    report.counts[f"{name}: {outcome}"] += 1
    slowest = f"{name}: slowest, in ms of CPU time"
    took = round(1000 * (time.process_time() - start))
    report.counts[slowest] = max(report.counts[slowest], took)


def _note(report: Report, finding: str, name: str, text: str) -> None:
    """Add a finding and write its text to a file, unless a similar finding is known."""
    if not any(known.startswith(finding[:60]) for known in report.findings):
        with tempfile.NamedTemporaryFile(
            "wb", prefix=f"rvdcomm-fuzz-{name}-", suffix=".txt", delete=False
        ) as file:
            file.write(text.encode("utf-8", "surrogatepass"))
        again = f"python -m tests.fuzz.parsers --target {name} --text @{file.name}"
        report.findings.append(f"{finding}\n  {text[:200]!r}\n  {again}")


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


class TooSlowError(Exception):
    """A text took longer than the limit."""


@contextmanager
def limited(cpu_secs: float) -> Iterator[None]:
    """Raise ``TooSlowError`` in the block if it uses more CPU time than the limit."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"more than {cpu_secs:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_secs)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


if __name__ == "__main__":
    raise SystemExit(main())
