"""Options: the settings that a model and a cluster allow, and the moves between settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Any

from superscaler_core.evaluation.request import Request
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.estimate import Estimate, estimate_of
from superscaler_core.planners.auto.families import layouts_of
from superscaler_core.planners.auto.setting import MAX_SAMPLES, Setting
from superscaler_core.planners.auto.traits import Traits

MAX_PARTS = 8
"""Most co-shard parts of an attention or MLP on a device, as in the studies."""

LEVELS = (Keep.EVERYTHING, Keep.ATTENTION_ONLY, Keep.SEGMENT_INPUTS, Keep.BLOCK_INPUTS)
"""Levels that a setting with which a search begins may have, each recomputing more."""


STORAGES: tuple[Mapping[str, Any], ...] = (
    {},
    {"zero": 3, "prefetch": 1, "reductions": True},
    {"zero": 3, "prefetch": 1, "reductions": True, "offload": True},
    {"offload": True},
)
"""Storage of weights; all but the first need replicas.

Each is a root of its own, because its gain is mainly the memory for larger microbatches.
"""


@dataclass(frozen=True, eq=False)
class SettingSpace:
    """The space of settings for one request and the traits of its model."""

    request: Request
    traits: Traits

    def roots(self) -> Iterator[Setting]:
        """Settings for every layout of the devices and the weights.

        Each has the microbatch size and the recomputation that seem the fastest within memory.
        """
        for chosen in layouts_of(self.request, self.traits):
            setting = self._with_defaults(chosen)
            storages = STORAGES if _has_replicas(self, setting) else STORAGES[:1]
            for storage in storages if self._sizes(setting) else ():
                yield from self._sized(replace(setting, **storage))

    def _sized(self, setting: Setting) -> Iterator[Setting]:
        """The setting with the best microbatch size; with the smallest one if none seems to fit.

        A setting that recomputes is added if nothing fits that keeps everything, or if it seems
        faster.
        """
        fitting = [*self._fitting(setting)]
        whole = self._fastest(each for each in fitting if each.keep is Keep.EVERYTHING)
        less = self._fastest(each for each in fitting if each.keep is not Keep.EVERYTHING)
        whole, less = (each and self._joined(each) for each in (whole, less))
        if less and (whole is None or self._secs(less) < self._secs(whole)):
            yield less
        if whole or not less:
            yield whole or replace(setting, samples=self._sizes(setting)[0])

    def _fitting(self, setting: Setting) -> Iterator[Setting]:
        """The setting with microbatch sizes that seem to fit, each at its fastest level.

        What a level recomputes, the next level recomputes as well, so the first level that fits is
        the fastest. A larger microbatch needs more memory at every level. Sizes behind the first
        one that is slower at the same level are left out, as a heuristic.
        """
        levels, sizes, last_secs = [*LEVELS], deque(self._sizes(setting)), inf
        while levels and sizes:
            keep = levels[0]
            apart = setting.family == "interlaced" and keep is not Keep.EVERYTHING
            each = replace(setting, samples=sizes[0], keep=keep, apart=apart)
            near = self.estimate.near(each)
            if not (self.allows(each) and near.num_bytes <= self.request.memory_bytes):
                levels, last_secs = levels[1:], inf
                continue
            yield each
            if near.secs > last_secs:
                return
            last_secs = near.secs
            sizes.popleft()

    def _joined(self, setting: Setting) -> Setting:
        """The setting, or the one without sequence parallelism if it fits and seems faster."""
        whole = replace(setting, sequence=False)
        fits = self.estimate.near(whole).num_bytes <= self.request.memory_bytes
        return whole if fits and self._secs(whole) < self._secs(setting) else setting

    def _fastest(self, settings: Iterable[Setting]) -> Setting | None:
        return min(settings, key=self._secs, default=None)

    def _secs(self, setting: Setting) -> float:
        return self.estimate.near(setting).secs

    def _sizes(self, setting: Setting) -> list[int]:
        """The samples per microbatch and replica that are possible, ascending."""
        every = (replace(setting, samples=samples) for samples in range(1, MAX_SAMPLES + 1))
        return [each.samples for each in every if self.allows(each)]

    @property
    def estimate(self) -> Estimate:
        """Estimates of time and memory of settings."""
        return estimate_of(self.request)

    def _with_defaults(self, setting: Setting) -> Setting:
        """Turn on what saves memory or time and costs nearly nothing; moves may turn it off."""
        is_shared = setting.dp > 1 or setting.family in ("axial", "spatial")
        chosen = replace(
            setting,
            zero=1 if is_shared and setting.family != "interlaced" else 0,
            vocabulary=self.traits.has_words and setting.tp > 1 and setting.family == "hybrid",
            moves=_in_tensor_parallel(self, setting),
            experts=self.has_experts(setting),
        )
        cut = replace(chosen, sequence=True)
        sizes = self._sizes(cut) if _may_cut_tokens(self, chosen) else []
        can_cut = any(self._secs(replace(cut, samples=samples)) < inf for samples in sizes[:1])
        return cut if can_cut else chosen

    def has_experts(self, setting: Setting) -> bool:
        """Whether expert parallelism over the replicas is possible."""
        num = self.traits.num_experts
        return setting.family == "hybrid" and setting.dp > 1 and num > 0 and num % setting.dp == 0

    def allows(self, setting: Setting) -> bool:
        """Whether the setting's choices are possible for this request, and differ from others."""
        request = self.request
        if setting.microbatch not in request.samples:
            return False
        num, rest = divmod(request.microbatches(setting.microbatch), 2 if setting.duplex else 1)
        is_pipeline = setting.pp > 1
        return (
            setting.samples <= MAX_SAMPLES
            and not rest
            and (not is_pipeline or num >= setting.pp)
            and (is_pipeline or setting.schedule == "interleaved")
            and (setting.chunks == 1 or (is_pipeline and num % setting.pp == 0))
            and setting.pp * setting.chunks <= self.traits.num_layers
            and (setting.keep is not Keep.ATTENTION_ONLY or self.traits.has_attention)
            and self._can_cut_features(setting)
        )

    def _can_cut_features(self, setting: Setting) -> bool:
        """Whether tensor parallelism and co-shard parts divide the inner features."""
        if setting.family not in ("hybrid", "interlaced"):
            return True
        traits, tp = self.traits, setting.tp
        return (tp == 1 or traits.can_cut_features(tp)) and (
            setting.coshard == 1
            or traits.can_cut_features(tp * setting.coshard, heavy=setting.heavy)
        )

    def moves(self, setting: Setting) -> Iterator[Setting]:
        """Settings that differ in one choice."""
        return self._changed(setting, MOVES)

    def savings(self, setting: Setting) -> Iterator[Setting]:
        """Settings that need less memory."""
        return self._changed(setting, SAVINGS)

    def _changed(self, setting: Setting, moves: Iterable[Move]) -> Iterator[Setting]:
        for changed in chain.from_iterable(move(self, setting) for move in moves):
            if changed != setting and self.allows(changed):
                yield changed


# --- moves --------------------------------------------------------------------------------------

Move = Callable[[SettingSpace, Setting], Iterator[Setting]]


def _values(name: str, *values: Any) -> Move:
    """A move that sets an attribute to each of ``values``, where it matters (``MATTERS``)."""

    def move(options: SettingSpace, setting: Setting) -> Iterator[Setting]:
        if MATTERS[name](options, setting):
            yield from (replace(setting, **{name: value}) for value in values)

    return move


def _in_pipeline(options: SettingSpace, setting: Setting) -> bool:
    return setting.family == "hybrid" and setting.pp > 1 and not options.request.recycle


def _has_replicas(options: SettingSpace, setting: Setting) -> bool:
    return setting.dp > 1 or setting.family in ("axial", "spatial")


def _in_tensor_parallel(options: SettingSpace, setting: Setting) -> bool:
    return setting.family == "hybrid" and setting.tp > 1


def _may_cut_tokens(options: SettingSpace, setting: Setting) -> bool:
    return _in_tensor_parallel(options, setting) and options.traits.has_tokens


def _scaled(options: SettingSpace, setting: Setting) -> Iterator[Setting]:
    """Double or halve the microbatch."""
    yield replace(setting, samples=2 * setting.samples)
    yield from _in_half(options, setting)


def _in_half(options: SettingSpace, setting: Setting) -> Iterator[Setting]:
    """Halve the microbatch."""
    if setting.samples > 1:
        yield replace(setting, samples=setting.samples // 2)


def _scheduled(options: SettingSpace, setting: Setting) -> Iterator[Setting]:
    """Other pipeline schedules."""
    if not _in_pipeline(options, setting):
        return
    for chunks in (1, 2, 4):
        yield replace(setting, schedule="interleaved", chunks=chunks)
    for schedule in ("zero-bubble", "zero-bubble-h2", "zero-bubble-v", "chimera", "dualpipe-v"):
        yield replace(setting, schedule=schedule, chunks=1)


def _kept(options: SettingSpace, setting: Setting) -> Iterator[Setting]:
    """Keep more activations, to recompute less."""
    levels = list(Keep)
    for keep in levels[: levels.index(setting.keep)]:
        yield replace(setting, keep=keep)


def _in_half_and_kept(options: SettingSpace, setting: Setting) -> Iterator[Setting]:
    """Halve the microbatch, and spend the saved memory on keeping more."""
    for halved in _in_half(options, setting):
        yield from _kept(options, halved)
        yield from _in_fewer_parts(options, halved)


def _in_more_parts(options: SettingSpace, setting: Setting) -> Iterator[Setting]:
    """Co-shard with twice as many parts, of all blocks or only of the heavy ones."""
    if setting.family != "hybrid" or not options.traits.has_features:
        return
    if setting.heavy:
        yield replace(setting, heavy=False)
    if setting.coshard < MAX_PARTS:
        more = replace(setting, coshard=2 * setting.coshard)
        yield more
        if setting.coshard == 1 and options.traits.has_heavy_blocks:
            yield replace(more, heavy=True)


def _in_fewer_parts(options: SettingSpace, setting: Setting) -> Iterator[Setting]:
    """Less co-shard, which only saves memory: fewer parts, in fewer blocks, or that keep all."""
    if setting.coshard == 1:
        return
    half = setting.coshard // 2
    yield replace(setting, coshard=half, heavy=setting.heavy and half > 1, keep_coshard=None)
    if options.traits.has_heavy_blocks:
        yield replace(setting, heavy=True)
    if setting.keep is not Keep.EVERYTHING:
        yield replace(setting, keep_coshard=Keep.EVERYTHING)


def _overlapped(options: SettingSpace, setting: Setting) -> Iterator[Setting]:
    """Weights prefetched and gradients reduced during the backward, or neither."""
    if _has_replicas(options, setting):
        for prefetch, reductions in ((0, False), (1, True), (2, True)):
            yield replace(setting, prefetch=prefetch, reductions=reductions)


def _sharded(options: SettingSpace, setting: Setting) -> Iterator[Setting]:
    """Other ZeRO stages; stage 3 also with two blocks' weights prefetched."""
    if _has_replicas(options, setting):
        for zero in (0, 1, 3):
            yield replace(setting, zero=zero)
        yield replace(setting, zero=3, prefetch=2, reductions=True)


def _kept_less(options: SettingSpace, setting: Setting) -> Iterator[Setting]:
    """Keep less, to recompute more."""
    levels = {
        Keep.EVERYTHING: (Keep.ATTENTION_ONLY, Keep.SEGMENT_INPUTS, Keep.BLOCK_INPUTS),
        Keep.BLOCK_INPUTS: (Keep.STAGE_INPUT,) if setting.pp > 1 else (),
    }
    for keep in levels.get(setting.keep, (Keep.BLOCK_INPUTS,)):
        if keep is not Keep.SEGMENT_INPUTS or setting.family != "axial":
            yield replace(setting, keep=keep)


MATTERS: Mapping[str, Callable[[SettingSpace, Setting], bool]] = {
    "sequence": _may_cut_tokens,
    "vocabulary": lambda o, s: (
        o.traits.has_words and s.tp > 1 and s.family in ("hybrid", "interlaced")
    ),
    "experts": SettingSpace.has_experts,
    "zero": _has_replicas,
    "offload": lambda o, s: s.offload or s.zero > 0,
    "moves": lambda o, s: s.tp > 1 or s.experts or s.zero == 3,
    "duplex": lambda o, s: s.tp > 1 or s.experts,
    "slack": lambda o, s: s.family == "interlaced",
    "apart": lambda o, s: (
        s.keep is not Keep.EVERYTHING and (s.family == "interlaced" or _in_pipeline(o, s))
    ),
}
"""For which settings an attribute matters, by its name."""

SWITCHES = ("sequence", "vocabulary", "experts", "moves", "duplex", "apart")
"""Attributes that are on or off."""

MOVES: tuple[Move, ...] = (
    *(_scaled, _scheduled, _kept, _in_half_and_kept, _overlapped, _sharded, _in_fewer_parts),
    *(_values(name, True, False) for name in SWITCHES),
    *(_values("slack", 0, 1), _values("offload", False)),
)
"""Changes of a setting that fits; ``Waiting`` orders them."""

SAVINGS: tuple[Move, ...] = (
    *(_kept_less, _in_more_parts, _in_half),
    *(_values("sequence", True), _values("zero", 3), _values("offload", True)),
)
"""Changes of a setting that lacks memory."""
