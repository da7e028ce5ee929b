"""Study: models, numbers of GPUs and systems to compare; and the four studies of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from bench.cells.cell import Cell
from bench.cells.cluster import EAGER, GPUS, PAPER
from bench.cells.workload import Workload
from bench.studies.systems import (
    COSHARD_GPT,
    COSHARD_SWIN,
    DAP,
    DAP_ZERO3,
    DEEPSPEED,
    DEEPSPEED_THEN,
    FSDP,
    INTERLACED,
    INTERLACED_BLOCK,
    MEGATRON,
    MEGATRON_THEN,
    NF1B,
    System,
)

Workloads = Mapping[int, Mapping[str, Workload]]
"""Workloads by number of GPUs and by label."""

ALPA = "alpa_hierarchical"
"""Our version of Alpa's planner: a baseline in every study and column."""

THEN, TODAY = "then", "today"
"""The columns: systems with their features of 2022, and with those of today."""

COLUMNS = {
    THEN: "the paper's plan against tuned baselines with their features of 2022, the paper's "
    "optimizer, flat rings, and hosts that launch kernel by kernel, but for Alpa's",
    TODAY: "what auto finds against tuned baselines with all of today's features and overlap",
}


@dataclass(frozen=True)
class Study:
    """One study of the paper.

    Attributes:
        title: title for people.
        claim: the paper's largest speed-up over the best baseline.
        plan: the paper's new plan, as in its public code.
        then: baselines with their features of 2022, without ``ALPA``.
        today: baselines with all of today's features and overlap, without ``ALPA``.
        workloads: workloads of the column of today, with optimizer states in float32.
        differences: differences of the workloads from that code with their reasons, one per text.
        optimizer: optimizer of that code; its states have the model's dtype.
        others: further systems of the column of then, which are no baselines.
    """

    title: str
    claim: float
    plan: System
    then: tuple[System, ...]
    today: tuple[System, ...]
    workloads: Workloads
    differences: tuple[str, ...]
    optimizer: str = "adam"
    others: tuple[System, ...] = ()

    @property
    def baselines(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the baselines, by column."""
        systems = {THEN: self.then, TODAY: self.today}
        return {
            column: (*(system.name for system in mine), ALPA) for column, mine in systems.items()
        }

    @property
    def ours(self) -> Mapping[str, str]:
        """The name of the planner that is compared with the baselines, by column."""
        return {THEN: self.plan.name, TODAY: "auto"}

    def cells(self, name: str) -> Iterator[tuple[str, str, Cell]]:
        """(Column, label, cell) of every cell; names of cells begin with the study's ``name``.

        The column of today also has the paper's plan, which is no baseline there.
        """
        systems = {
            THEN: {each.name: each for each in (self.plan, *self.then, *self.others)},
            TODAY: {each.name: each for each in (*self.today, self.plan)},
        }
        auto = self.ours[TODAY]
        for num, workloads in self.workloads.items():
            for label, workload in workloads.items():
                text = f"{name}-{num}-{label}".replace(" ", "_")
                today = Cell(
                    text, workload, num, systems[TODAY], first=(auto, ALPA), has_check=False,
                    pulled=(auto,),
                )  # fmt: skip
                then = replace(
                    today,
                    name=f"{text}-{THEN}",
                    workload=replace(workload, optimizer=self.optimizer, master_dtype=None),
                    systems=systems[THEN],
                    first=(ALPA,),
                    communication="ring",
                    cluster=EAGER,
                    clusters={ALPA: PAPER},
                    pulled=(),
                    overlaps=False,
                )
                yield THEN, label, then
                yield TODAY, label, today


def budget_of(cell: Cell, largest_secs: float) -> float:
    """The budget of every search in a cell, given that on the most GPUs.

    On fewer GPUs an evaluation takes less time.
    """
    return largest_secs * (cell.num_gpus / max(GPUS)) ** (1 / 3)


# --- Swin ---------------------------------------------------------------------------------------


def _swin(layers: int, width: int, heads: int) -> Mapping[str, Workload]:
    sizes = {
        "image": 1536, "window": 48, "width": width, "heads": heads,
        "depths": (2, 2, layers, 2),
    }  # fmt: skip
    return {f"L{layers} C{width}": Workload("swin", sizes, "float16", 512)}


SWIN = Study(
    "Swin Transformer with co-shard",
    3.5,
    COSHARD_SWIN,
    (MEGATRON_THEN, DEEPSPEED_THEN),
    (MEGATRON, DEEPSPEED, FSDP),
    {
        4: _swin(26, 512, 16), 8: _swin(42, 768, 24), 16: _swin(50, 1024, 32),
        32: _swin(58, 1536, 32),
    },
    (
        "Sizes are those of the public code: image 1536, window 48, depths [2, 2, L, 2], 32 heads "
        "on 32 GPUs. Batch of 512 images, as the paper says of all models but AlphaFold2.",
        "Attention keeps its matrix (no fused kernel), as code of 2022 for windows with a bias "
        "does.",
        "Co-shard as written: tensor parallel x parts of 2x4, 4x6, 4x4 and 8x4 on 4, 8, 16 and 32 "
        "GPUs (the artifact of the paper's successor); the blocks with most tokens are in parts, "
        "in equal numbers where the code halves them from the first group to the second.",
    ),
)  # fmt: skip

# --- GPT-3 --------------------------------------------------------------------------------------

SEQUENCES = (2048, 8192, 12288)


def _gpt(layers: int, width: int, heads: int = 32) -> Mapping[str, Workload]:
    return {
        f"L{layers} d{width} s{sequence}": Workload(
            "gpt",
            {
                "layers": layers, "width": width, "heads": heads, "sequence": sequence,
                "vocabulary": 51200, "fused": False,
            },
            "float16",
            512,
        )
        for sequence in SEQUENCES
    }  # fmt: skip


GPT3 = Study(
    "GPT-3 with co-shard and long sequences",
    1.5,
    COSHARD_GPT,
    (MEGATRON_THEN, DEEPSPEED_THEN),
    (MEGATRON, DEEPSPEED, FSDP),
    {4: _gpt(32, 2560), 8: _gpt(32, 4096), 16: _gpt(48, 5120), 32: _gpt(64, 6144, 48)},
    (
        "2.6, 6.7 and 15 B parameters on 4, 8 and 16 GPUs, each with 32 heads, are models of the "
        "public code. It names none for 32 GPUs: 29 B with 48 heads of 128 is our choice.",
        "Batch of 512 sequences.",
        "Attention keeps its matrix: V100s have no flash attention, and the public code has none.",
    ),
)

# --- mBART --------------------------------------------------------------------------------------


def _mbart(layers: int, width: int, heads: int) -> Mapping[str, Workload]:
    sizes = {"layers": layers, "width": width, "heads": heads, "head_width": 64}
    return {f"L{layers} d{width}": Workload("mbart", sizes, "float32", 512)}


MBART = Study(
    "mBART with interlaced pipeline",
    2.8,
    INTERLACED,
    (MEGATRON_THEN, DEEPSPEED_THEN),
    (MEGATRON, DEEPSPEED, FSDP),
    {
        4: _mbart(16, 3072, 24), 8: _mbart(24, 4096, 32), 16: _mbart(36, 5120, 32),
        32: _mbart(48, 6144, 32),
    },
    (
        "Sizes are those of the public code: L layers of encoder and L of decoder, 500,000 words, "
        "float32, heads of 64 features whatever the width (39.3 B parameters on 32 GPUs).",
        "Batch of 512 sequences of 1024 tokens; a classifier behind the decoder and no output over "
        "the words, as in that code.",
        "Interlaced-block, of which no public text says what it is, is here the same pipeline with "
        "recomputation inside the backward. The paper: 1.9 x over Megatron-LM, and 1.5 x from it "
        "to the interlaced pipeline.",
    ),
    others=(INTERLACED_BLOCK,),
)  # fmt: skip

# --- AlphaFold2 ---------------------------------------------------------------------------------

RECYCLE = 2
"""Forwards without gradient before each trained forward (3F1B)."""


def _evoformer(layers: int, msa: int, pair: int) -> Mapping[str, Workload]:
    sizes: dict[str, Any] = {"layers": layers, "msa_width": msa, "pair_width": pair}
    label = f"L{layers} cm{msa} cz{pair}"
    return {label: Workload("evoformer", sizes, "float16", 128, recycle=RECYCLE)}


ALPHAFOLD2 = Study(
    "AlphaFold2 with 3F1B",
    1.4,
    NF1B,
    (DAP, DAP_ZERO3),
    (DAP, DAP_ZERO3),
    {
        4: _evoformer(48, 256, 128), 8: _evoformer(48, 1024, 256), 16: _evoformer(48, 1536, 512),
        32: _evoformer(64, 1536, 512),
    },
    (
        "The Evoformer alone, 128 sequences x 256 residues, heads of 32, float16, as in the public "
        "code. Its layers and widths are arguments whose values the code does not say: 48 blocks "
        "of AlphaFold2's widths on 4 GPUs, and wider ones on more, are our choice.",
        f"Batch of 128 samples, each of {RECYCLE} turns without gradient and one with.",
    ),
    "momentum",
)  # fmt: skip

STUDIES = {"swin": SWIN, "gpt3": GPT3, "mbart": MBART, "alphafold2": ALPHAFOLD2}


@cache
def cells() -> Mapping[str, Cell]:
    """The cells of all studies, by name."""
    found = [cell for name, study in STUDIES.items() for *_, cell in study.cells(name)]
    return {cell.name: cell for cell in found}


def compute(cell: str, planner: str, budget_secs: float) -> dict[str, Any]:
    """Compute the row of a cell and a planner, given by their names."""
    return cells()[cell].row(planner, budget_secs)
