"""Guided: atheris (libFuzzer) chooses the next text to damage, guided by code coverage.

This runs in a process of its own, because libFuzzer ends the process when its time is over.
``mutate.py`` damages the texts; atheris only decides which damaged texts to damage further.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["rvdcomm"]):
    from tests.fuzz import parsers
    from tests.fuzz.command import Report
    from tests.fuzz.mutate import mutated
    from tests.fuzz.texts import TARGETS, WEIGHTS

NAMES = list(TARGETS)
NUM_SAMPLES = 300
COUNT_EVERY = 200


def text_of(data: bytes) -> tuple[str, str]:
    """The target, which the first byte determines, and the text."""
    return NAMES[data[0] % len(NAMES)], data[1:].decode("utf-8", "replace")


def data_of(name: str, text: str) -> bytes:
    return bytes([NAMES.index(name)]) + text.encode("utf-8", "replace")


def main(folder: str, seed: str, secs: str) -> None:
    """Fuzz; write counts of outcomes to ``counts`` and findings to ``finding-N`` in the folder."""
    out = Path(folder)
    corpus = out / "corpus"
    corpus.mkdir()
    rng = random.Random(f"guided/{seed}")
    samples = {name: target.samples(rng) for name, target in TARGETS.items()}
    for i in range(NUM_SAMPLES):
        name = rng.choices(NAMES, WEIGHTS)[0]
        (corpus / str(i)).write_bytes(data_of(name, next(samples[name])))
    report = Report("guided")
    # Instrumented code is slower, so texts get more time.
    parsers.CPU_SECS *= 3

    def try_one(data: bytes) -> None:
        if not data:
            return
        known = len(report.findings)
        parsers.try_text(report, *text_of(data))
        for i in range(known, len(report.findings)):
            (out / f"finding-{i:04}").write_text(report.findings[i])
        if sum(report.counts.values()) % COUNT_EVERY == 0:
            # Written regularly, because libFuzzer ends the process without returning.
            lines = [f"{count} {name}" for name, count in report.counts.items()]
            (out / "counts").write_text("\n".join(lines))

    def mutate(data: bytes, max_size: int, mutation_seed: int) -> bytes:
        name, text = text_of(data or b"\0")
        draw = random.Random(mutation_seed)
        return data_of(name, mutated(draw, text, text))[:max_size]

    words = [sys.argv[0], f"-max_total_time={secs}", f"-seed={int(seed) + 1}", "-max_len=8192"]
    words += ["-timeout=60", "-rss_limit_mb=4096", f"-artifact_prefix={folder}/", str(corpus)]
    atheris.Setup(words, try_one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
