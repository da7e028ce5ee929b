"""``python -m bench.gallery``: write the page of plans with pictures of their simulated steps.

A command draws each picture, and the page shows this command.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from superscaler_core.cli import main as superscaler

PAGE = Path("docs/gallery.md")
FOLDER = Path("docs/img/gallery")


@dataclass(frozen=True)
class Shown:
    """A plan of the gallery.

    Attributes:
        name: name of the picture's file, without suffix.
        title: title of the plan.
        text: what to look at in the picture.
        words: arguments of ``superscaler simulate``.
    """

    name: str
    title: str
    text: str
    words: str

    @property
    def command(self) -> str:
        """The command that draws the picture."""
        return f"superscaler simulate {self.words} --picture {self.name}.png"


def _gpt(plan: str, more: str = "") -> str:
    """Arguments for a GPT that is so large that its ops take longer than their launches."""
    sizes = {"layers": 8, "width": 1024, "heads": 16, "sequence": 1024, "model.vocabulary": 2048}
    given = " ".join(f"--set {name}={size}" for name, size in sizes.items())
    words = f"gpt {plan} --devices 4 {given} --dtype float16 --microbatch 4 {more}"
    return words.strip()


GALLERY: tuple[tuple[str, tuple[Shown, ...]], ...] = (
    (
        "One stage",
        (
            Shown(
                "data_parallel", "Data parallel",
                "Each device computes its samples; gradients are summed in the end.",
                _gpt("data_parallel", "--topology v100:2x2"),
            ),
            Shown(
                "data_parallel-overlap", "Data parallel, with overlap",
                "As above, but gradients are summed while the rest of the backward runs.",
                _gpt("data_parallel", "--topology v100:2x2 --overlap 1"),
            ),
            Shown(
                "zero3", "ZeRO-3, weights fetched one block ahead",
                "Weights are stored in pieces and fetched before each block, here during the block "
                "before it.",
                _gpt("zero3", "--topology v100:2x2 --overlap 1"),
            ),
            Shown(
                "megatron", "Tensor parallel",
                "Every attention and MLP is cut, and ends with a sum over the devices.",
                _gpt("megatron"),
            ),
        ),
    ),
    (
        "Pipelines",
        (
            Shown(
                "one_f_one_b", "1F1B",
                "Stages wait at the beginning and at the end, and keep fewer activations the later "
                "they are.",
                _gpt("one_f_one_b:microbatches=8"),
            ),
            Shown(
                "interleaved", "1F1B, two stages a device",
                "The bubble is half as long.",
                _gpt("interleaved:microbatches=8,chunks=2"),
            ),
            Shown(
                "zero_bubble", "Zero bubble",
                "The gradients of weights are computed in the time that is idle above.",
                _gpt("zero_bubble:microbatches=8"),
            ),
            Shown(
                "chimera", "Chimera",
                "Two pipelines in opposite directions: each device has two stages.",
                _gpt("chimera:microbatches=8"),
            ),
            Shown(
                "terapipe", "Slices of a sequence",
                "One microbatch; its tokens follow each other through the stages.",
                _gpt("terapipe:slices=8"),
            ),
        ),
    ),
    (
        "Plans of the SuperScaler paper",
        (
            Shown(
                "coshard", "Co-shard",
                "Attention and MLP are cut in parts that stay on a device and take turns: less "
                "memory, and no more communication.",
                _gpt("coshard:parts=4"),
            ),
            Shown(
                "interlaced", "Interlaced pipeline of mBART",
                "The embeddings are cut over all devices, which look words up between the runs of "
                "their stages.",
                "mbart interlaced:microbatches=8 --devices 4 --set layers=4 --set width=1024 "
                "--set heads=16 --set sequence=512 --set target_sequence=512 "
                "--set model.vocabulary=64000 --dtype float16",
            ),
            Shown(
                "nf1b", "3F1B of AlphaFold2",
                "Two turns without gradients pass all stages before the turn with gradients.",
                "evoformer nf1b:recycle=2,microbatches=4 --devices 4 --set layers=4",
            ),
        ),
    ),
    (
        "Communication inside a stage, hidden",
        (
            Shown(
                "expert_parallel", "Experts on all devices",
                "Tokens go to their experts and come back, twice a block.",
                "moe expert_parallel --devices 4 --set layers=2 --set width=1024 --set heads=16 "
                "--set sequence=512 --topology v100:2x2 --dtype float16 --microbatch 8",
            ),
            Shown(
                "expert_parallel-duplex", "Experts on all devices, in two halves",
                "One half of the microbatch computes while the other communicates.",
                "moe expert_parallel --devices 4 --set layers=2 --set width=1024 --set heads=16 "
                "--set sequence=512 --topology v100:2x2 --dtype float16 --duplex --microbatch 4",
            ),
        ),
    ),
)  # fmt: skip
"""The plans of the page, by heading."""

HEAD = """\
# Plans in pictures

Each picture is a simulated training step on V100s, drawn by the command above it: devices from top
to bottom, time from left to right, and below it the memory of devices. Thin bars under devices are
communication that is hidden behind something else. How plans are written is in [plans](plans.md),
how steps are simulated in [simulate](simulate.md). `python -m bench.gallery` draws all of them
again.
"""


def page() -> str:
    """The text of the page."""
    lines = [HEAD]
    for heading, plans in GALLERY:
        lines.append(f"## {heading}\n")
        for shown in plans:
            command = " \\\n    ".join(_folded(shown.command))
            picture = f"![{shown.title}]({(FOLDER / shown.name).relative_to('docs')}.png)"
            lines.append(f"### {shown.title}\n\n{shown.text}\n\n    {command}\n\n{picture}\n")
    return "\n".join(lines)


def _folded(command: str, width: int = 90) -> list[str]:
    lines = [""]
    for word in command.replace(" --", "\n--").split("\n"):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def main() -> int:
    """Draw all pictures and write the page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for shown in tqdm([each for _, plans in GALLERY for each in plans], disable=None):
        path = FOLDER / f"{shown.name}.png"
        words = ["simulate", *shlex.split(shown.words), "--summary", "--picture", str(path)]
        if code := superscaler(words):
            return code
    PAGE.write_text(page())
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
