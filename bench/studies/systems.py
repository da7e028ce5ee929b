"""Systems: what the studies compare, each a planner over a few of the settings that ``auto`` has.

There are two columns. Systems *of the paper* have the grids and features of the paper's public
code: no sharded states, no overlap, whole blocks recomputed. Systems *of today* have all features
that they have today, and overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from superscaler_core.plan import Keep
from superscaler_core.planners.auto import Proposals, Setting, Settings, options_of
from superscaler_core.planners.auto.options import Options, powers
from superscaler_core.planners.search.request import Request

Layouts = Callable[[int], Iterable[Setting]]
"""From the number of GPUs to settings with microbatches of one sample a replica."""

Changes = tuple[Mapping[str, Any], ...]
"""Values of a setting's attributes."""

MAX_SAMPLES = 16
"""Samples of a microbatch and replica."""

WHOLE_BLOCKS: Changes = ({}, {"keep": Keep.BLOCK_INPUTS})
"""What blocks keep in the paper's systems: all, or their input alone."""

KEEPS: Changes = ({}, {"keep": Keep.SEGMENT_INPUTS}, {"keep": Keep.BLOCK_INPUTS})
"""What they keep today: all, what segments between communication read, or their input alone."""

OVERLAP: Changes = (
    {"prefetch": 1, "reductions": True},
    {"prefetch": 1, "reductions": True, "moves": True},
)
"""Weights fetched ahead, gradients reduced during the backward pass, and moves started early."""

INTERLEAVED: Changes = ({"chunks": 2}, {"chunks": 4})


@dataclass(frozen=True)
class System:
    """A planner that turns a system's own knobs; microbatches grow while they fit.

    Attributes:
        name: for tables.
        layouts: its settings.
        ladder: changes that save memory, each more of it than the one before, in more time.
        offers: changes that are tried on what fits.
    """

    name: str
    layouts: Layouts
    ladder: Changes = WHOLE_BLOCKS
    offers: Changes = ()

    def __call__(self, request: Request) -> Proposals:
        """Propose all that can be."""
        return Proposals(request, _Knobs(self, options_of(request)))


@dataclass(frozen=True)
class _Knobs(Settings):
    """A system's settings for one request."""

    system: System
    options: Options

    def roots(self) -> Iterator[Setting]:
        for setting in self.system.layouts(len(self.options.request.devices)):
            first = self._of_model(replace(setting, **self.system.ladder[0]))
            sizes = (replace(first, samples=n) for n in powers(MAX_SAMPLES))
            yield from islice(filter(self.options.allows, sizes), 1)

    def _of_model(self, setting: Setting) -> Setting:
        """Without cuts of words and sequences where the model has none."""
        traits = self.options.traits
        return replace(
            setting,
            vocabulary=setting.vocabulary and traits.has_words,
            sequence=setting.sequence and traits.has_tokens,
        )

    def moves(self, setting: Setting) -> Iterator[Setting]:
        larger = {"samples": min(2 * setting.samples, MAX_SAMPLES)}
        for change in (larger, *self.system.offers):
            changed = replace(setting, **change)
            if changed != setting and self.options.allows(changed):
                yield changed

    def savings(self, setting: Setting) -> Iterator[Setting]:
        rungs = self.system.ladder
        here = max(i for i, rung in enumerate(rungs) if replace(setting, **rung) == setting)
        for rung in rungs[here + 1 : here + 2]:
            yield replace(setting, **rung)


# --- layouts ------------------------------------------------------------------------------------


def grids(**given: Any) -> Layouts:
    """All grids of data, tensor and pipeline parallel."""

    def layouts(num: int) -> Iterator[Setting]:
        for tp in powers(num):
            for pp in powers(num // tp):
                yield _grid(num, tp, pp, given)

    return layouts


def _grid(num: int, tp: int, pp: int, given: Mapping[str, Any]) -> Setting:
    """What needs several devices in a group or several replicas is left out where there is one."""
    needs = {"sequence": tp > 1, "vocabulary": tp > 1, "zero": num > tp * pp}
    chosen = {name: value for name, value in given.items() if needs.get(name, True)}
    return replace(Setting(dp=num // (tp * pp), tp=tp, pp=pp), **chosen)


def wide_tensor_parallel(**given: Any) -> Layouts:
    """Tensor parallel over all GPUs, or over each half of them in a stage of its own."""
    return lambda num: [_grid(num, num // pp, pp, given) for pp in (1, 2)]


def zero3(offloads: Sequence[bool], **given: Any) -> Layouts:
    """ZeRO-3 with tensor parallel inside."""

    def layouts(num: int) -> Iterator[Setting]:
        for tp in powers(num // 2):
            for offload in offloads:
                yield _grid(num, tp, 1, {"zero": 3, "offload": offload, **given})

    return layouts


def axial(num: int, stages: Iterable[int], **given: Any) -> Iterator[Setting]:
    """Stages of axial and data parallel groups."""
    for pp in stages:
        for dp in powers(num // pp):
            yield Setting("axial", dp=dp, tp=num // (pp * dp), pp=pp, **given)


# --- the paper's baselines ----------------------------------------------------------------------

TENSOR_PARALLEL = System("tensor parallel", wide_tensor_parallel(vocabulary=True))
"""Baseline of Swin and mBART in the paper's public code."""

MEGATRON_2022 = System("Megatron 1F1B", grids(vocabulary=True))
DEEPSPEED_2022 = System("DeepSpeed ZeRO-3", zero3((False, True), vocabulary=True))

DAP_2022 = System("DAP", lambda num: [Setting("axial", tp=num)])
"""All GPUs share every sample."""

# --- the baselines of today ---------------------------------------------------------------------

MEGATRON = System(
    "Megatron", grids(zero=1, vocabulary=True, sequence=True), KEEPS, (*INTERLEAVED, *OVERLAP)
)
"""1F1B and interleaved, sequence parallel, sharded states, and overlap."""

DEEPSPEED = System("ZeRO-3", zero3((False, True), vocabulary=True), KEEPS, OVERLAP)
"""With prefetch, and with weights and states on the host."""

DAP = System("DAP+DP", lambda num: axial(num, (1,), zero=1), WHOLE_BLOCKS, OVERLAP)
DAP_ZERO3 = System("DAP ZeRO-3", lambda num: axial(num, (1,), zero=3), WHOLE_BLOCKS, OVERLAP)

# --- the paper's own plans, as written ----------------------------------------------------------

COSHARD_GRIDS = {4: (2, 4), 8: (4, 6), 16: (4, 4), 32: (8, 4)}
"""Swin: tensor parallel GPUs and parts of a layer on each, by GPUs; stages take the rest."""


def _coshard_swin(num: int) -> Iterator[Setting]:
    tp, parts = COSHARD_GRIDS[num]
    keep = {"keep": Keep.BLOCK_INPUTS, "keep_coshard": Keep.EVERYTHING}
    yield Setting(tp=tp, pp=num // tp, coshard=parts, heavy=True, **keep)


def _coshard_gpt(num: int) -> Iterator[Setting]:
    for pp in powers(num):
        yield Setting(dp=num // pp, pp=pp, coshard=8)


COSHARD_SWIN = System("co-shard", _coshard_swin, ({}, {"keep_coshard": None}))
"""The blocks that keep most in parts, which keep the input of each attention and MLP."""

COSHARD_GPT = System("co-shard", _coshard_gpt)
"""Eight parts of every layer, no tensor parallel."""

INTERLACED_BLOCK = System(
    "interlaced-block", lambda num: [Setting("interlaced", pp=num)], WHOLE_BLOCKS
)
"""The table of the paper's public code, a stage a GPU, with recomputation inside the backward."""

INTERLACED = System(
    "interlaced",
    lambda num: [Setting("interlaced", pp=num)],
    ({}, {"keep": Keep.BLOCK_INPUTS, "apart": True}),
)
"""The same with recomputation beside the forward, as that code has it."""

NF1B = System("3F1B", lambda num: axial(num, powers(num)[1:]))
"""Pipelines with turns without gradient; one stage would be DAP with data parallel."""
