"""Setting: all of auto's decisions about a plan, as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from superscaler_core.errors import PlanError
from superscaler_core.plan import Keep

MAX_SAMPLES = 32
"""Most samples per microbatch and replica: more gain nothing, and leave pipelines empty."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of auto's space; ``str`` shows the layout and what differs from the defaults.

    Law (tests/superscaler_core/evaluation): ``Setting.parse(str(x)) == x``.

    Attributes:
        family: how ops are cut, a name of ``FAMILIES``.
        dp: data-parallel degree: replicas that share the batch.
        tp: tensor-parallel degree: devices that share features, or rows and columns.
        pp: pipeline-parallel degree: groups of devices with stages of their own.
        samples: samples of a microbatch per replica.
        schedule: a name of ``SCHEDULES``.
        chunks: stages per worker of the schedule ``interleaved``.
        sequence, vocabulary, experts: what else is cut, as in ``hybrid``.
        zero: ZeRO stage among the devices that read a weight: 0, 1 or 3.
        offload: whether weights and optimizer states are stored on the host.
        keep: what blocks keep for their backward.
        apart: whether recomputations are actions of the pipeline schedule, as in ``hybrid``.
        coshard: co-shard parts of every attention and MLP on a device.
        heavy: whether only the blocks that keep most are in co-shard parts (``heavy_blocks``).
        keep_coshard: what blocks in co-shard parts keep besides; as ``keep`` if None.
        slack: as in ``interlaced``.
        prefetch, reductions, moves, duplex: as in ``Overlap``.
    """

    family: str = "hybrid"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    samples: int = 1
    schedule: str = "interleaved"
    chunks: int = 1
    sequence: bool = False
    vocabulary: bool = False
    experts: bool = False
    zero: int = 0
    offload: bool = False
    keep: Keep = Keep.EVERYTHING
    apart: bool = False
    coshard: int = 1
    heavy: bool = False
    keep_coshard: Keep | None = None
    slack: int = 0
    prefetch: int = 0
    reductions: bool = False
    moves: bool = False
    duplex: bool = False

    @property
    def microbatch(self) -> int:
        """Samples of a microbatch over all replicas."""
        return self.samples * self.dp

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of plans that it is an example of, among ``evaluation.KINDS``."""
        has = {
            "ZeRO 1": self.zero == 1, "ZeRO 3": self.zero == 3,
            "tensor parallel": self.tp > 1, "pipeline": self.pp > 1,
        }  # fmt: skip
        return frozenset(kind for kind, is_one in has.items() if is_one)

    def __str__(self) -> str:
        default = Setting()
        words = [self.family, f"dp={self.dp} tp={self.tp} pp={self.pp} samples={self.samples}"]
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in _SAID or value == getattr(default, each.name):
                continue
            words.append(each.name if value is True else f"{each.name}={value}")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: the text has another form; the message has the known names.
        """
        family, *words = text.split()
        given = {}
        for name, _, value in (word.partition("=") for word in words):
            try:
                given[name] = _READ[name](value or "on")
            except (KeyError, ValueError):
                raise PlanError(
                    f"{text!r}: {name}={value or 'on'} is no choice of auto's plans, which are "
                    f"FAMILY NAME=VALUE ... of the names "
                    f"{', '.join(name for name in _READ if name != 'family')}."
                ) from None
        return cls(family, **given)

    def options(self, *names: str) -> Mapping[str, Any]:
        """The values of some attributes, by name."""
        return {name: getattr(self, name) for name in names}


_SAID = ("family", "dp", "tp", "pp", "samples")

_READERS: Mapping[str, Callable[[str], Any]] = {"Keep": Keep, "str": str, "int": int, "bool": bool}

_READ = {each.name: _READERS[str(each.type).split()[0]] for each in fields(Setting)}
"""For every attribute, the function that reads its value."""
