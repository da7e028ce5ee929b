"""Study: what is trained on how many GPUs, by which systems; and the four of the paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.studies.systems import (
    DAP,
    DAP_ZERO3,
    DEEPSPEED,
    DEEPSPEED_WORDS,
    IN_STEPS,
    INTERLACED,
    MEGATRON,
    MEGATRON_WORDS,
    NF1B,
    RECYCLE,
    System,
    coshard,
)
from bench.studies.workload import Workload


@dataclass(frozen=True)
class Study:
    """One study.

    Attributes:
        title: for people.
        claim: the paper's largest speed-up over the best baseline.
        ours: the systems with the paper's new plans.
        baselines: those that it is compared with.
        workloads: by the number of GPUs, each by its label.
        assumptions: about the workloads, a line each.
    """

    title: str
    claim: float
    ours: tuple[System, ...]
    baselines: tuple[System, ...]
    workloads: Mapping[int, Mapping[str, Workload]]
    assumptions: tuple[str, ...]

    @property
    def systems(self) -> tuple[System, ...]:
        """All, the baselines first."""
        return (*self.baselines, *self.ours)


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
    (coshard("", "0-3"),),
    (MEGATRON, DEEPSPEED),
    {
        4: _swin(32, 512, 16),
        8: _swin(40, 768, 24),
        16: _swin(48, 1024, 32),
        32: _swin(56, 1536, 32),
    },
    (
        "Models as in the artifact of the paper's successor: image 1536, window 48, depths "
        "[2, 2, L, 2], L and C by GPUs; heads of 32 features, 48 on 32 GPUs, where 48 heads could "
        "not be cut in 32.",
        "Batch of 512 images, as the paper says of all models but AlphaFold2.",
        "Attention keeps its matrix (no fused kernel), as code of 2022 for windows with a bias "
        "does; co-shard's parts of it are recomputed.",
        "Co-shard may be of all blocks or of the first four, which have most tokens.",
    ),
)

# --- GPT-3 --------------------------------------------------------------------------------------

SEQUENCES = (2048, 8192, 12288)


def _gpt(layers: int, width: int, heads: int) -> Mapping[str, Workload]:
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
    (coshard(vocabulary=True),),
    (MEGATRON_WORDS, DEEPSPEED_WORDS),
    {4: _gpt(24, 2048, 32), 8: _gpt(32, 4096, 32), 16: _gpt(48, 5120, 40), 32: _gpt(64, 6144, 48)},
    (
        "1.3, 6.7 and 15 B parameters on 4, 8 and 16 GPUs are models of the paper's public code; "
        "the one on 32 (29 B) is ours, as it is not said there.",
        "Batch of 512 sequences.",
        "Attention keeps its matrix: V100s have no flash attention, and the paper's code has none.",
    ),
)

# --- mBART --------------------------------------------------------------------------------------


def _mbart(layers: int, width: int, heads: int) -> Mapping[str, Workload]:
    sizes = {"layers": layers, "width": width, "heads": heads}
    return {f"L{layers} d{width}": Workload("mbart", sizes, "float32", 512)}


MBART = Study(
    "mBART with interlaced pipeline",
    2.8,
    (IN_STEPS, INTERLACED),
    (MEGATRON_WORDS, DEEPSPEED_WORDS),
    {
        4: _mbart(16, 3072, 24), 8: _mbart(24, 4096, 32), 16: _mbart(32, 5120, 32),
        32: _mbart(48, 6144, 32),
    },
    (
        "L layers of encoder and L of decoder, 500,000 words, float32, as in the paper's public "
        "code for 4, 8 and 32 GPUs; the model on 16 is ours, as it is not said there.",
        "Batch of 512 sequences of 1024 tokens; a classifier behind the decoder, no output over "
        "the words, as in that code.",
    ),
)  # fmt: skip

# --- AlphaFold2 ---------------------------------------------------------------------------------


def _evoformer(layers: int, msa: int, pair: int) -> Mapping[str, Workload]:
    sizes: dict[str, Any] = {"layers": layers, "msa_width": msa, "pair_width": pair}
    return {f"L{layers} cm{msa} cz{pair}": Workload("evoformer", sizes, "float16", 128)}


ALPHAFOLD2 = Study(
    "AlphaFold2 with 3F1B",
    1.4,
    (NF1B,),
    (DAP, DAP_ZERO3),
    {
        4: _evoformer(48, 256, 128), 8: _evoformer(48, 1024, 256), 16: _evoformer(48, 1536, 512),
        32: _evoformer(64, 1536, 512),
    },
    (
        "The Evoformer alone, 128 sequences x 256 residues, heads of 32, float16; widths and "
        "layers are arguments of the paper's public code whose values are not said: 48 blocks of "
        "AlphaFold2's own widths on 4 GPUs, wider ones on more, are ours.",
        f"Batch of 128 samples, each of {RECYCLE} turns without gradient and one with.",
        "All systems run the turns; the baselines one after another on all devices.",
        "Devices that read the same weights share master weights and states (ZeRO 1): those of a "
        "stage under 3F1B, all under DAP.",
    ),
)  # fmt: skip

STUDIES = {"swin": SWIN, "gpt3": GPT3, "mbart": MBART, "alphafold2": ALPHAFOLD2}
