"""Presets: common devices, with the vendors' figures.

Peaks are dense, for one device. The host link is one direction of its PCIe link, as the vendor
states it; the host memory bandwidth is an eighth of that of NVIDIA's server with eight devices.
Efficiencies are assumptions, the same for all devices: a tuned transformer reaches about half of
the matrix peak in its products, and a streaming kernel about 0.8 of the memory's.
"""

from __future__ import annotations

from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.errors import PlanError

EFFICIENCY = {"products": 0.5, "attention": 0.4, "bytes": 0.8}
"""Assumed; change them by ``dataclasses.replace(profile, efficiency={...})``."""

LAUNCH_SECS = 5e-6
"""Launch time of one kernel in a full stream: a typical figure, not a vendor's."""


def _gpu(
    name: str, tflops: dict[str, float], gb_per_sec: float, gib: int, host: tuple[float, float]
) -> DeviceProfile:
    return DeviceProfile(
        name,
        {dtype: 1e12 * value for dtype, value in tflops.items()},
        1e9 * gb_per_sec,
        gib << 30,
        host_bytes_per_sec=1e9 * host[0],
        host_memory_bytes_per_sec=1e9 * host[1],
        launch_secs=LAUNCH_SECS,
        efficiency=EFFICIENCY,
    )


PROFILES = {
    # NVIDIA V100 data sheet (2020), SXM2: 125 TFLOP/s tensor cores, 15.7 single, 7.8 double;
    # 900 GB/s of HBM2, 32 GB; PCIe 3.0 x16, 32 GB/s both directions. bfloat16 has no tensor cores
    # there: it runs at single precision. DGX-1: two Xeon E5-2698 v4 of four channels DDR4-2400.
    "v100": _gpu(
        "V100-32GB",
        {"float16": 125, "bfloat16": 15.7, "float32": 15.7, "float64": 7.8}, 900, 32, (16, 19),
    ),
    # NVIDIA A100 data sheet (2021), 80GB SXM: 312 TFLOP/s of float16 and bfloat16, 19.5 single
    # (156 with TF32, which torch leaves off), 19.5 double; 2039 GB/s; PCIe 4.0, 64 GB/s both ways.
    # DGX A100: two EPYC 7742 of eight channels DDR4-3200.
    "a100": _gpu(
        "A100-80GB",
        {"float16": 312, "bfloat16": 312, "float32": 19.5, "float64": 19.5}, 2039, 80, (32, 51),
    ),
    # NVIDIA H100 data sheet (2023), SXM: 1979 TFLOP/s of float16 and bfloat16 with sparsity, half
    # without; 67 single, 67 double tensor; 3350 GB/s, 80 GB; PCIe 5.0, 128 GB/s both.
    # DGX H100: two Xeon 8480C of eight channels DDR5-4800.
    "h100": _gpu(
        "H100-80GB",
        {"float16": 989.5, "bfloat16": 989.5, "float32": 67, "float64": 67}, 3350, 80, (64, 77),
    ),
}  # fmt: skip


def profile_of(name: str) -> DeviceProfile:
    """The preset of this name.

    Raises:
        PlanError: there is no preset of that name.
    """
    if name not in PROFILES:
        raise PlanError(f"there is no profile {name!r}; there are {', '.join(PROFILES)}.")
    return PROFILES[name]
