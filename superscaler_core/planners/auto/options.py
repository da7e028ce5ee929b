"""Options: the settings that a model and a cluster allow, and the moves between settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from superscaler_core.plan import Keep
from superscaler_core.planners.auto.guess import Guess
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import Traits
from superscaler_core.planners.search.request import Request

MAX_SAMPLES = 32
"""Most samples per microbatch and replica: more gain nothing, and leave pipelines empty."""

MAX_PARTS = 8
"""Most co-shard parts of an attention or MLP on a device, as in the studies."""


KEPT_LESS = (Keep.ATTENTION_ONLY, Keep.SEGMENT_INPUTS, Keep.BLOCK_INPUTS)
"""Levels that a setting with which a search begins may have, besides ``EVERYTHING``."""


@dataclass(frozen=True, eq=False)
class Options:
    """The space of settings for one request.

    Attributes:
        request: the model, cluster and step.
        traits: traits of the model.
    """

    request: Request
    traits: Traits

    def roots(self) -> Iterator[Setting]:
        """Settings for every layout of the devices and the weights.

        Each has the microbatch size and the recomputation guessed to be the fastest within memory.
        """
        for family, lay_out in LAYOUTS.items():
            for chosen in lay_out(self):
                setting = self._with_defaults(replace(chosen, family=family))
                yield from self._sized(setting)
                for storage in STORAGES if _has_replicas(self, setting) else ():
                    yield from self._sized(replace(setting, **storage))

    def _sized(self, setting: Setting) -> Iterator[Setting]:
        """The setting with the best microbatch size; with the smallest one if none seems to fit.

        Sequence parallelism is chosen as well, where it seems to help. A setting that recomputes is
        added if nothing fits that keeps everything, or if it seems faster.
        """
        cuts = (False, True) if _may_cut_tokens(self, setting) else (False,)
        every = [
            replace(setting, sequence=cut, samples=n)
            for cut, n in product(cuts, range(1, MAX_SAMPLES + 1))
        ]
        sizes = [each for each in every if self.allows(each)]
        whole = self._fastest(sizes)
        apart = setting.family == "interlaced"
        smaller = (replace(each, keep=k, apart=apart) for k, each in product(KEPT_LESS, sizes))
        less = self._fastest(filter(self.allows, smaller))
        if whole is None or (less is not None and self.guess.secs(less) < self.guess.secs(whole)):
            yield from [less] if less is not None else sizes[:1]
        if whole is not None:
            yield whole

    def _fastest(self, settings: Iterable[Setting]) -> Setting | None:
        """The setting with the least guessed time among those guessed to fit in memory."""
        memory_bytes = self.request.memory_bytes
        fit = (each for each in settings if self.guess.num_bytes(each) <= memory_bytes)
        return min(fit, key=self.guess.secs, default=None)

    @cached_property
    def guess(self) -> Guess:
        """Estimates of time and memory of settings."""
        return Guess(self.request)

    def _with_defaults(self, setting: Setting) -> Setting:
        """Turn on what saves memory or time and costs nearly nothing; moves may turn it off."""
        is_shared = setting.dp > 1 or setting.family in ("axial", "spatial")
        return replace(
            setting,
            zero=1 if is_shared and setting.family != "interlaced" else 0,
            vocabulary=self.traits.has_words and setting.tp > 1 and setting.family == "hybrid",
            moves=_in_tensor_parallel(self, setting),
            experts=self.has_experts(setting),
        )

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
            and (setting.keep is not Keep.ATTENTION_ONLY or bool(self.traits.attentions))
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
        for move in MOVES:
            for changed in move(self, setting):
                if changed != setting and self.allows(changed):
                    yield changed

    def savings(self, setting: Setting) -> Iterator[Setting]:
        """Settings that need less memory."""
        for move in SAVINGS:
            for changed in move(self, setting):
                if changed != setting and self.allows(changed):
                    yield changed


# --- layouts ------------------------------------------------------------------------------------


def powers(most: int) -> list[int]:
    """Powers of two up to a number, ascending."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _hybrid(options: Options) -> Iterator[Setting]:
    num, traits = len(options.request.devices), options.traits
    sides = [n for n in range(1, num + 1) if num % n == 0]
    for tp, pp in product(sides, sides):
        if num % (tp * pp) or (tp > 1 and not traits.has_features) or pp > traits.num_layers:
            continue
        yield Setting(dp=num // (tp * pp), tp=tp, pp=pp)


def _axial(options: Options) -> Iterator[Setting]:
    num = len(options.request.devices)
    if not options.traits.is_axial:
        return
    for pp, dp in product(powers(num), powers(num)):
        if num % (pp * dp) == 0:
            yield Setting(dp=dp, tp=num // (pp * dp), pp=pp)


def _interlaced(options: Options) -> Iterator[Setting]:
    num, traits = len(options.request.devices), options.traits
    is_possible = traits.has_blocks and traits.has_lookups and traits.has_features
    if not is_possible or options.request.recycle:
        return
    for tp in powers(num // 2):
        if num % tp == 0 and num // tp <= traits.num_layers:
            yield Setting(tp=tp, pp=num // tp, slack=1)


def _spatial(options: Options) -> Iterator[Setting]:
    num = len(options.request.devices)
    if options.traits.has_images and not options.request.recycle:
        for rows in powers(num)[1:]:
            if num % rows == 0:
                yield Setting(dp=num // rows, tp=rows)


LAYOUTS: dict[str, Callable[[Options], Iterator[Setting]]] = {
    "hybrid": _hybrid,
    "axial": _axial,
    "interlaced": _interlaced,
    "spatial": _spatial,
}
"""By family, the layouts of the devices; empty if the model does not allow the family."""


STORAGES: tuple[Mapping[str, Any], ...] = (
    {"zero": 3, "prefetch": 1, "reductions": True},
    {"zero": 3, "prefetch": 1, "reductions": True, "offload": True},
    {"offload": True},
)
"""Further storage of weights, if there are replicas.

Each is a root of its own, because its gain is mainly the memory for larger microbatches.
"""


# --- moves --------------------------------------------------------------------------------------

Move = Callable[[Options, Setting], Iterator[Setting]]


def _values(name: str, *values: Any, when: Callable[[Options, Setting], bool]) -> Move:
    """A move that sets an attribute to each of ``values``, where ``when`` holds."""

    def move(options: Options, setting: Setting) -> Iterator[Setting]:
        if when(options, setting):
            for value in values:
                yield replace(setting, **{name: value})

    return move


def _in_pipeline(options: Options, setting: Setting) -> bool:
    return setting.family == "hybrid" and setting.pp > 1 and not options.request.recycle


def _has_replicas(options: Options, setting: Setting) -> bool:
    return setting.dp > 1 or setting.family in ("axial", "spatial")


def _in_tensor_parallel(options: Options, setting: Setting) -> bool:
    return setting.family == "hybrid" and setting.tp > 1


def _may_cut_tokens(options: Options, setting: Setting) -> bool:
    return _in_tensor_parallel(options, setting) and options.traits.has_tokens


def _scaled(options: Options, setting: Setting) -> Iterator[Setting]:
    """Double or halve the microbatch."""
    for samples in (2 * setting.samples, setting.samples // 2):
        if samples:
            yield replace(setting, samples=samples)


def _in_half(options: Options, setting: Setting) -> Iterator[Setting]:
    """Halve the microbatch."""
    if setting.samples > 1:
        yield replace(setting, samples=setting.samples // 2)


def _scheduled(options: Options, setting: Setting) -> Iterator[Setting]:
    """Other pipeline schedules."""
    if not _in_pipeline(options, setting):
        return
    for chunks in (1, 2, 4):
        yield replace(setting, schedule="interleaved", chunks=chunks)
    for schedule in ("zero-bubble", "zero-bubble-h2", "zero-bubble-v", "chimera", "dualpipe-v"):
        yield replace(setting, schedule=schedule, chunks=1)


def _kept(options: Options, setting: Setting) -> Iterator[Setting]:
    """Keep more activations, to recompute less."""
    levels = list(Keep)
    for keep in levels[: levels.index(setting.keep)]:
        yield replace(setting, keep=keep)


def _in_half_and_kept(options: Options, setting: Setting) -> Iterator[Setting]:
    """Halve the microbatch, and spend the saved memory on keeping more."""
    for halved in _in_half(options, setting):
        yield from _kept(options, halved)
        yield from _in_fewer_parts(options, halved)


def _in_more_parts(options: Options, setting: Setting) -> Iterator[Setting]:
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


def _in_fewer_parts(options: Options, setting: Setting) -> Iterator[Setting]:
    """Less co-shard, which only saves memory: fewer parts, in fewer blocks, or that keep all."""
    if setting.coshard == 1:
        return
    half = setting.coshard // 2
    yield replace(setting, coshard=half, heavy=setting.heavy and half > 1, keep_coshard=None)
    if options.traits.has_heavy_blocks:
        yield replace(setting, heavy=True)
    if setting.keep is not Keep.EVERYTHING:
        yield replace(setting, keep_coshard=Keep.EVERYTHING)


def _overlapped(options: Options, setting: Setting) -> Iterator[Setting]:
    """Weights prefetched and gradients reduced during the backward, or neither."""
    if _has_replicas(options, setting):
        for prefetch, reductions in ((0, False), (1, True), (2, True)):
            yield replace(setting, prefetch=prefetch, reductions=reductions)


def _sharded(options: Options, setting: Setting) -> Iterator[Setting]:
    """Other ZeRO stages; stage 3 also with two blocks' weights prefetched."""
    if _has_replicas(options, setting):
        for zero in (0, 1, 3):
            yield replace(setting, zero=zero)
        yield replace(setting, zero=3, prefetch=2, reductions=True)


MOVES: tuple[Move, ...] = (
    _scaled,
    _scheduled,
    _kept,
    _in_half_and_kept,
    _values("sequence", True, False, when=_may_cut_tokens),
    _values("moves", True, False, when=lambda o, s: s.tp > 1 or s.experts or s.zero == 3),
    _overlapped,
    _values("experts", True, False, when=lambda o, s: o.has_experts(s)),
    _sharded,
    _values("vocabulary", True, False,
            when=lambda o, s: o.traits.has_words and s.tp > 1
            and s.family in ("hybrid", "interlaced")),
    _in_fewer_parts,
    _values("apart", True, False,
            when=lambda o, s: s.keep is not Keep.EVERYTHING
            and (s.family == "interlaced" or _in_pipeline(o, s))),
    _values("slack", 0, 1, when=lambda o, s: s.family == "interlaced"),
    _values("duplex", True, False, when=lambda o, s: s.tp > 1 or s.experts),
    _values("offload", False, when=lambda o, s: s.offload),
)  # fmt: skip
"""Changes of a setting that fits; ``Ranking`` orders them."""

SAVINGS: tuple[Move, ...] = (
    _values("keep", Keep.ATTENTION_ONLY, when=lambda o, s: s.keep is Keep.EVERYTHING),
    _values("keep", Keep.SEGMENT_INPUTS,
            when=lambda o, s: s.keep is Keep.EVERYTHING and s.family != "axial"),
    _values("keep", Keep.BLOCK_INPUTS, when=lambda o, s: s.keep is not Keep.BLOCK_INPUTS),
    _values("keep", Keep.STAGE_INPUT, when=lambda o, s: s.keep is Keep.BLOCK_INPUTS and s.pp > 1),
    _values("sequence", True, when=_may_cut_tokens),
    _values("zero", 3, when=_has_replicas),
    _in_more_parts,
    _in_half,
    _values("offload", True, when=lambda o, s: s.zero > 0),
)  # fmt: skip
"""Changes of a setting that lacks memory; ``Guess`` selects those that may fit."""
