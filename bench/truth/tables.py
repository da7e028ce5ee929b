"""Tables of measured steps and their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.tables import Lines
from bench.truth.published import HOW


def errors(found: Sequence[Mapping[str, Any]]) -> Lines:
    """The errors of each reading for each part of the rows."""
    head = (
        "reading", "rows of", "rows", "error", "median", "bias", "worst", "groups",
        "chosen/fastest", "worst choice", "rule/fastest", "no room",
    )  # fmt: skip
    lines: list[Sequence[str]] = [head]
    for each in found:
        lines.append((
            each["reading"], each["part"], str(each["num_rows"]),
            f"{each['mean_absolute_error']:.1%}", f"{each['median_absolute_error']:.1%}",
            f"{each['bias']:+.1%}", f"{each['largest_absolute_error']:.0%}", str(each["groups"]),
            _ratio(each["chosen_over_fastest"]), _ratio(each["largest_chosen_over_fastest"]),
            _ratio(each["rule_over_fastest"]), str(each["does_not_fit"]),
        ))  # fmt: skip
    return lines


def published(papers: Sequence[Mapping[str, Any]]) -> Lines:
    """Published steps with full and with selective recomputation, and the errors of ours."""
    lines: list[Sequence[str]] = [
        (
            "model",
            "GPUs",
            "full",
            "predicted",
            "selective",
            "predicted",
            "saved",
            "predicted",
            "GiB",
        )
    ]
    for each in papers:
        pairs = [(each[f"{how}_secs"], each[f"predicted_{how}_secs"]) for how in HOW]
        saved = [1 - after / before for before, after in zip(*pairs, strict=True)]
        texts = [(f"{real:.2f} s", f"{secs / real - 1:+.1%}") for real, secs in pairs]
        savings = (f"{share:.1%}" for share in saved)
        gib = f"{each['selective_peak_bytes'] / 2**30:.0f}"
        lines.append((each["model"], str(each["gpus"]), *texts[0], *texts[1], *savings, gib))
    return lines


def scaled(papers: Sequence[Mapping[str, Any]]) -> Lines:
    """Published throughputs and predicted ones."""
    lines: list[Sequence[str]] = [
        ("model", "GPUs", "TFLOP/s", "predicted", "error", "microbatch", "chunks")
    ]
    for each in papers:
        real, mine = each["tflops"], each["predicted_tflops"]
        figures = str(real), f"{mine:.0f}", f"{mine / real - 1:+.1%}"
        lines.append((each["model"], str(each["gpus"]), *figures, str(each["micro"]),
                      str(each["chunks"])))  # fmt: skip
    return lines


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
