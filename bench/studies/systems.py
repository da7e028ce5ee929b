"""Systems that the studies compare; each is a planner over a few of the settings of ``auto``.

There are two columns. Systems *of the paper* have the grids and features of the paper's public
code: no sharded optimizer states, no overlap, and recompute of whole blocks only. Systems *of
today* have all features that they have today, and overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from superscaler_core.evaluation import Request
from superscaler_core.plan import Keep
from superscaler_core.planners import SettingSpace, powers
from superscaler_core.planners.auto import Proposals, Setting, Settings, options_of

Layouts = Callable[[int], Iterable[Setting]]
"""From the number of GPUs to settings with microbatches of one sample per replica."""

Changes = tuple[Mapping[str, Any], ...]
"""Changes of a setting: new values of its attributes."""

MAX_SAMPLES = 16
"""Largest number of samples per microbatch and replica."""

WHOLE_BLOCKS: Changes = ({}, {"keep": Keep.BLOCK_INPUTS})
"""Blocks of the paper's systems keep everything for the backward, or only their input."""

KEEPS: Changes = (
    {},
    {"keep": Keep.ATTENTION_ONLY},
    {"keep": Keep.SEGMENT_INPUTS},
    {"keep": Keep.BLOCK_INPUTS},
)
"""What blocks keep today.

Everything, all but the inside of attentions (Megatron's selective recomputation), the inputs of
segments between communications, or their input.
"""

OVERLAP: Changes = (
    {"prefetch": 1, "reductions": True},
    {"prefetch": 1, "reductions": True, "moves": True},
)
"""Overlap of today: prefetch of weights, gradient reductions during the backward, early moves."""

INTERLEAVED: Changes = ({"chunks": 2}, {"chunks": 4})


@dataclass(frozen=True)
class System:
    """A planner over the options of one system; microbatches grow while they fit.

    Attributes:
        name: name in tables.
        layouts: the settings from which the search begins.
        ladder: changes that save memory; each saves more than the one before and takes more time.
        offers: changes that are tried on settings that fit.
    """

    name: str
    layouts: Layouts
    ladder: Changes = WHOLE_BLOCKS
    offers: Changes = ()

    def __call__(self, request: Request) -> Proposals:
        """Propose candidates for a request."""
        return Proposals(request, _Knobs(self, options_of(request)))


@dataclass(frozen=True)
class _Knobs(Settings):
    """A system's settings for one request."""

    system: System
    options: SettingSpace

    def roots(self) -> Iterator[Setting]:
        for setting in self.system.layouts(len(self.options.request.devices)):
            first = self._of_model(replace(setting, **self.system.ladder[0]))
            sizes = (replace(first, samples=n) for n in powers(MAX_SAMPLES))
            yield from islice(filter(self.options.allows, sizes), 1)

    def _of_model(self, setting: Setting) -> Setting:
        """The setting without splits of vocabulary or sequence if the model has none."""
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
    """All grids of data, tensor and pipeline parallelism."""

    def layouts(num: int) -> Iterator[Setting]:
        for tp in powers(num):
            for pp in powers(num // tp):
                yield _grid(num, tp, pp, given)

    return layouts


def _grid(num: int, tp: int, pp: int, given: Mapping[str, Any]) -> Setting:
    """A setting of a grid; options that need tp > 1, or several replicas, are dropped otherwise."""
    needs = {"sequence": tp > 1, "vocabulary": tp > 1, "zero": num > tp * pp}
    chosen = {name: value for name, value in given.items() if needs.get(name, True)}
    return replace(Setting(dp=num // (tp * pp), tp=tp, pp=pp), **chosen)


def wide_tensor_parallel(**given: Any) -> Layouts:
    """Tensor parallelism over all GPUs, or in two stages over one half of the GPUs each."""
    return lambda num: [_grid(num, num // pp, pp, given) for pp in (1, 2)]


def zero3(offloads: Sequence[bool], **given: Any) -> Layouts:
    """ZeRO-3 over replicas that may be tensor parallel."""

    def layouts(num: int) -> Iterator[Setting]:
        for tp in powers(num // 2):
            for offload in offloads:
                yield _grid(num, tp, 1, {"zero": 3, "offload": offload, **given})

    return layouts


def axial(num: int, stages: Iterable[int], **given: Any) -> Iterator[Setting]:
    """Pipelines whose stages combine axial and data parallelism."""
    for pp in stages:
        for dp in powers(num // pp):
            yield Setting("axial", dp=dp, tp=num // (pp * dp), pp=pp, **given)


# --- the paper's baselines ----------------------------------------------------------------------

TENSOR_PARALLEL = System("tensor parallel", wide_tensor_parallel(vocabulary=True))
"""Baseline of Swin and mBART in the paper's public code."""

MEGATRON_2022 = System("Megatron 1F1B", grids(vocabulary=True))
DEEPSPEED_2022 = System("DeepSpeed ZeRO-3", zero3((False, True), vocabulary=True))

DAP_2022 = System("DAP", lambda num: [Setting("axial", tp=num)])
"""Dynamic axial parallelism: all GPUs share every sample."""

# --- the baselines of today ---------------------------------------------------------------------

MEGATRON = System(
    "Megatron", grids(zero=1, vocabulary=True, sequence=True), KEEPS, (*INTERLEAVED, *OVERLAP)
)
"""1F1B and interleaved 1F1B, sequence parallelism, sharded optimizer states, and overlap."""

DEEPSPEED = System("ZeRO-3", zero3((False, True), vocabulary=True), KEEPS, OVERLAP)
"""ZeRO-3 with prefetch, with and without offload of weights and optimizer states to the host."""

DAP = System("DAP+DP", lambda num: axial(num, (1,), zero=1), WHOLE_BLOCKS, OVERLAP)
DAP_ZERO3 = System("DAP ZeRO-3", lambda num: axial(num, (1,), zero=3), WHOLE_BLOCKS, OVERLAP)

# --- the paper's own plans, as written ----------------------------------------------------------

COSHARD_GRIDS = {4: (2, 4), 8: (4, 6), 16: (4, 4), 32: (8, 4)}
"""Swin: (tensor-parallel degree, co-shard parts per GPU) by number of GPUs; the rest are stages."""


def _coshard_swin(num: int) -> Iterator[Setting]:
    tp, parts = COSHARD_GRIDS[num]
    keep = {"keep": Keep.BLOCK_INPUTS, "keep_coshard": Keep.EVERYTHING}
    yield Setting(tp=tp, pp=num // tp, coshard=parts, heavy=True, **keep)


def _coshard_gpt(num: int) -> Iterator[Setting]:
    for pp in powers(num):
        yield Setting(dp=num // pp, pp=pp, coshard=8)


COSHARD_SWIN = System("co-shard", _coshard_swin, ({}, {"keep_coshard": None}))
"""Only blocks that keep most are in parts; these keep the inputs of each attention and MLP."""

COSHARD_GPT = System("co-shard", _coshard_gpt)
"""Eight co-shard parts of every layer, no tensor parallelism."""

INTERLACED_BLOCK = System(
    "interlaced-block", lambda num: [Setting("interlaced", pp=num)], WHOLE_BLOCKS
)
"""The interlaced schedule of the paper's public code: one stage per GPU, recompute in backwards."""

INTERLACED = System(
    "interlaced",
    lambda num: [Setting("interlaced", pp=num)],
    ({}, {"keep": Keep.BLOCK_INPUTS, "apart": True}),
)
"""The same with recomputations as actions of the schedule (``apart``), as in that code."""

NF1B = System("3F1B", lambda num: axial(num, powers(num)[1:]))
"""Pipelines with forwards without gradient; a single stage would be DAP with data parallelism."""
