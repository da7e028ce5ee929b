"""Stats: how fast steps or evaluations ran, and what they used, as values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

from rvdcomm.units import bytes_text, secs_text


@dataclass(frozen=True, slots=True)
class StepStats:
    """One or several calls of ``step``, or of ``evaluate``, on this rank.

    Laws (tests/superscaler_core/parallel/test_stats.py): the sum of the stats of two calls has the
    sums of what they count; rates of a sum are those of its counts.

    Attributes:
        kind: "step" or "evaluate".
        number: how many calls of this kind there were, with the last of these.
        num_calls: how many calls these are.
        secs: seconds inside of the calls. On CUDA a call returns before the device is done.
        wall_secs: seconds from the end of the call before to the end of each call: those inside,
            and what the loop does between calls, such as the optimizer and loading data. Rates
            are per second of these; they are right on CUDA too, once the device is the slower one.
        samples: samples of the whole batches.
        tokens: elements of the first input of integers that has at least two dims; 0 if none has.
        sent_bytes: bytes that this rank sent to others.
        sent_is_counted: whether the transport counted them; if not, they are what the plans of the
            program say.
        peak_bytes: the peak of this rank's memory.
        peak_is_measured: whether the device's allocator measured it, since the process began or
            ``torch.cuda.reset_peak_memory_stats``. If not, it is what the program accounts for:
            parameters, gradients, activations and buffers of a step, without optimizer states.
        model_flops: floating-point operations of the model on all devices, without recomputation.
        num_devices: devices that shared them.
        peak_flops_per_sec: the peak of a device, if it is known.
    """

    kind: str
    number: int = 0
    num_calls: int = 0
    secs: float = 0.0
    wall_secs: float = 0.0
    samples: int = 0
    tokens: int = 0
    sent_bytes: int = 0
    sent_is_counted: bool = True
    peak_bytes: int = 0
    peak_is_measured: bool = False
    model_flops: float = 0.0
    num_devices: int = 1
    peak_flops_per_sec: float | None = None

    def __add__(self, other: StepStats) -> StepStats:
        """The stats of these calls and of later ones."""
        return replace(
            other,
            num_calls=self.num_calls + other.num_calls,
            secs=self.secs + other.secs,
            wall_secs=self.wall_secs + other.wall_secs,
            samples=self.samples + other.samples,
            tokens=self.tokens + other.tokens,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            sent_is_counted=self.sent_is_counted and other.sent_is_counted,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            model_flops=self.model_flops + other.model_flops,
        )

    def times(self, num: int) -> StepStats:
        """The stats of so many equal calls, without their times."""
        return replace(
            self,
            num_calls=num,
            samples=self.samples * num,
            tokens=self.tokens * num,
            sent_bytes=self.sent_bytes * num,
            model_flops=self.model_flops * num,
        )

    @property
    def samples_per_sec(self) -> float:
        """Samples of the whole batches per second."""
        return _rate(self.samples, self.wall_secs)

    @property
    def tokens_per_sec(self) -> float:
        """Tokens of the whole batches per second."""
        return _rate(self.tokens, self.wall_secs)

    @property
    def model_flops_per_sec(self) -> float:
        """Floating-point operations of the model per second, on all devices together."""
        return _rate(self.model_flops, self.wall_secs)

    @property
    def model_flops_utilisation(self) -> float | None:
        """The share of all devices' peak that the model used (MFU); None if no peak is known."""
        if self.peak_flops_per_sec is None:
            return None
        return self.model_flops_per_sec / (self.peak_flops_per_sec * self.num_devices)

    @property
    def values(self) -> dict[str, float]:
        """The numbers that are logged, per call, by name; those that are not known are left out."""
        num = max(self.num_calls, 1)
        found: dict[str, float | None] = {
            "secs": self.secs / num,
            "wall_secs": self.wall_secs / num,
            "samples_per_sec": self.samples_per_sec,
            "tokens_per_sec": self.tokens_per_sec if self.tokens else None,
            "sent_bytes": self.sent_bytes / num,
            "peak_bytes": self.peak_bytes,
            "model_flops": self.model_flops / num,
            "model_flops_utilisation": self.model_flops_utilisation,
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        """The stats in one line.

        >>> print(StepStats("step", 3, 2, 0.5, 1.0, 16, 96, 2048, True, 4096))
        step 2 to 3: 250 ms each, 16 samples/s, 96 tokens/s, sent 1 KiB each, peak 4 KiB
        """
        first = self.number - self.num_calls + 1
        which = f"{self.number}" if self.num_calls < 2 else f"{first} to {self.number}"
        each = " each" if self.num_calls > 1 else ""
        num = max(self.num_calls, 1)
        words = [f"{secs_text(self.secs / num)}{each}", f"{self.samples_per_sec:.4g} samples/s"]
        words += [f"{self.tokens_per_sec:.4g} tokens/s"] if self.tokens else []
        words += [f"sent {bytes_text(self.sent_bytes // num)}{each}"]
        words += [f"peak {bytes_text(self.peak_bytes)}"]
        mfu = self.model_flops_utilisation
        words += [] if mfu is None else [f"MFU {100 * mfu:.1f} %"]
        return f"{self.kind} {which}: {', '.join(words)}"


@dataclass(frozen=True, slots=True)
class Stats:
    """The last step, and all steps since the stats before this one were taken."""

    last: StepStats
    all: StepStats

    def __str__(self) -> str:
        return str(self.all)


def summed(stats: list[StepStats], kind: str) -> StepStats:
    """The sum of some stats of one kind, in their order."""
    return reduce(StepStats.__add__, stats) if stats else StepStats(kind)


def _rate(amount: float, secs: float) -> float:
    return amount / secs if secs else 0.0
