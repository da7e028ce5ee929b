"""Systems that the studies compare; each is a planner over a few of the settings of ``auto``.

Every system may use all grids of its kinds of parallelism, and microbatches of all powers of two,
which are all sizes that divide the batch among replicas. There are two columns: systems of *then*
have the features that their code had in 2022, each with its source, and systems of *today* have all
features and overlap. The paper's own plans are as its code has them.
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
from superscaler_core.planners.auto.setting import MAX_SAMPLES

Layouts = Callable[[int], Iterable[Setting]]
"""From the number of GPUs to settings with microbatches of one sample per replica."""

Changes = tuple[Mapping[str, Any], ...]
"""Changes of a setting: new values of its attributes."""

WHOLE_BLOCKS: Changes = ({}, {"keep": Keep.BLOCK_INPUTS})
"""Blocks keep everything for the backward, or only their input."""

SELECTIVE: Changes = ({}, {"keep": Keep.ATTENTION_ONLY}, {"keep": Keep.BLOCK_INPUTS})
"""Blocks keep everything, all but the inside of attentions, or only their input."""

KEEPS: Changes = (*SELECTIVE[:2], {"keep": Keep.SEGMENT_INPUTS}, *SELECTIVE[2:])
"""Today, blocks can also keep the inputs of segments between communications."""

OVERLAP: Changes = (
    {"prefetch": 1, "reductions": True},
    {"prefetch": 1, "reductions": True, "moves": True},
)
"""Overlap of today: prefetch of weights, gradient reductions during the backward, early moves."""

INTERLEAVED: Changes = tuple({"schedule": "interleaved", "chunks": chunks} for chunks in (2, 4))

SCHEDULES: Changes = (
    *INTERLEAVED,
    *({"schedule": name, "chunks": 1} for name in ("zero-bubble", "zero-bubble-v", "dualpipe-v")),
)
"""Schedules of today besides 1F1B, as torch.distributed.pipelining has them."""


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


def grids(offloads: Sequence[bool] = (False,), **given: Any) -> Layouts:
    """All grids of data, tensor and pipeline parallelism.

    Args:
        offloads: whether optimizer states are on the host: the choices.
        given: further options of all settings.
    """

    def layouts(num: int) -> Iterator[Setting]:
        for tp in powers(num):
            for pp in powers(num // tp):
                for offload in offloads:
                    yield _grid(num, tp, pp, {"offload": offload, **given})

    return layouts


def _grid(num: int, tp: int, pp: int, given: Mapping[str, Any]) -> Setting:
    """A setting of a grid; options that need tp > 1, or several replicas, are dropped otherwise."""
    is_replicated = num > tp * pp
    needs = {
        "sequence": tp > 1, "vocabulary": tp > 1, "zero": is_replicated, "experts": is_replicated,
    }  # fmt: skip
    chosen = {name: value for name, value in given.items() if needs.get(name, True)}
    return replace(Setting(dp=num // (tp * pp), tp=tp, pp=pp), **chosen)


def zero3(has_stages: bool = False, **given: Any) -> Layouts:
    """ZeRO-3 over replicas that may be tensor parallel, with and without offload to the host.

    Args:
        has_stages: whether the replicas may be pipelines.
        given: further options of all settings.
    """

    def layouts(num: int) -> Iterator[Setting]:
        for tp in powers(num // 2):
            for pp in powers(num // (2 * tp)) if has_stages else (1,):
                for offload in (False, True):
                    yield _grid(num, tp, pp, {"zero": 3, "offload": offload, **given})

    return layouts


def axial(num: int, stages: Iterable[int], **given: Any) -> Iterator[Setting]:
    """Pipelines whose stages combine axial and data parallelism."""
    for pp in stages:
        for dp in powers(num // pp):
            yield Setting("axial", dp=dp, tp=num // (pp * dp), pp=pp, **given)


# --- baselines of then --------------------------------------------------------------------------

MEGATRON_THEN = System(
    "Megatron-LM", grids(zero=1, vocabulary=True, sequence=True), SELECTIVE, INTERLEAVED
)
"""Megatron-LM of August 2022.

It had 1F1B and interleaved 1F1B, sequence parallelism, a distributed optimizer and selective
recomputation, as the description of huggingface/accelerate pull request 667 lists. Its gradients
were reduced after the backward.
"""


def deepspeed_then(num: int) -> Iterator[Setting]:
    """ZeRO-3, and ZeRO-Offload: states that are sharded and on the host."""
    yield from zero3(vocabulary=True)(num)
    for tp in powers(num):
        yield _grid(num, tp, 1, {"zero": 1, "offload": True, "vocabulary": True})


DEEPSPEED_THEN = System("DeepSpeed ZeRO-3", deepspeed_then, WHOLE_BLOCKS, OVERLAP[:1])
"""ZeRO-3 and ZeRO-Offload (arXiv 2101.06840) of DeepSpeed of 2021, inside Megatron-LM's tensor
parallelism.

It prefetched weights and overlapped the reductions: issue 1069 of DeepSpeed, of May to July 2021,
is about the speed of its prefetching. ZeRO-3 and pipelines exclude each other there.
"""

# --- baselines of today -------------------------------------------------------------------------

MEGATRON = System(
    "Megatron",
    grids((False, True), zero=1, vocabulary=True, sequence=True),
    KEEPS,
    (*SCHEDULES, *OVERLAP),
)
"""Pipelines of all schedules, sequence parallelism, overlap, and sharded optimizer states, which
may be on the host (``--optimizer-cpu-offload``)."""

DEEPSPEED = System("ZeRO-3", zero3(vocabulary=True), KEEPS, OVERLAP)
"""ZeRO-3 with prefetch, with and without offload of weights and optimizer states to the host."""

FSDP = System(
    "FSDP+TP+PP",
    zero3(has_stages=True, vocabulary=True, sequence=True),
    KEEPS,
    (*SCHEDULES, *OVERLAP),
)
"""Sharded weights under tensor parallelism in the stages of a pipeline, as in torchtitan."""

DEEPSPEED_MOE = System(
    "DeepSpeed-MoE",
    grids((False, True), zero=1, experts=True, vocabulary=True, sequence=True),
    KEEPS,
    (*SCHEDULES, *OVERLAP),
)
"""Experts are dealt out to the replicas, whose samples go to them and back by all-to-alls.

Grids whose replicas do not divide the experts are Megatron's, which is a baseline too.
"""

DAP = System("DAP+DP", lambda num: axial(num, (1,), zero=1), WHOLE_BLOCKS, OVERLAP)
"""Dynamic axial parallelism and data parallelism.

It is a baseline of both columns, also with ZeRO-3: FastFold overlapped its communication in March
2022 (arXiv 2203.00854, "Duality Async Operation").
"""

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
