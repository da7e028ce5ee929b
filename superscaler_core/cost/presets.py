"""Presets: common devices, with the vendors' peaks and the shares of them that were measured.

A share without a published figure (cited here and in ``docs/costs.md``) is *assumed*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from superscaler_core.checks import one_of
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.cost.reach import Reach

LAUNCH_SECS = 5e-6
"""Launch time of one kernel in a full stream: a typical figure, not a vendor's. clpeak measures
7.2 us on a V100 (github.com/jjkeijser/clpeak); XLA's shortest products on an H100 take 5.8 us."""

ISSUE_SECS, ACTION_SECS = 48e-6, 1.5e-3
"""Time of a host that runs a model from Python, for a kernel and for an action of a stage besides:
fitted to measured steps of Megatron-LM on A100s (``docs/truth.md``)."""

FUSED_ELSEWHERE = 0.4
"""Assumed share of fused attention for dtypes and devices without a figure."""


def _squares(peak_tflops: float, tflops: Mapping[int, float]) -> Reach:
    """Shares from measured speeds of products of square matrices, by their rows.

    Measured times include a launch, which a profile counts beside the product. The tables leave
    out larger sizes at which the speed falls again, because the device was slowed to save power.
    """
    points = []
    for rows, speed in tflops.items():
        flops = 2.0 * rows**3
        secs = flops / (1e12 * speed) - LAUNCH_SECS
        points.append((flops, flops / secs / (1e12 * peak_tflops)))
    return Reach(tuple(points))


def _flat(share: float) -> Reach:
    return Reach(((1.0, share),))


def _by_dtype(half: Reach, single: Reach) -> dict[str, Reach]:
    return {"float16": half, "bfloat16": half, "float32": single, "float64": single}


# Products in torch 2.7 on a Tesla V100-SXM2-16GB, by rows of square matrices:
# github.com/zzc0721/torch-performance-test-data issue 140. bfloat16 is emulated there. 512 rows:
# cuBLAS, 13.51 us, github.com/cloudrift-ai/emmy pull 760, which has 62, 84, 103 TFLOP/s for the
# next three sizes. float64 is assumed to reach the shares of float32.
_V100_FLOAT32 = _squares(15.7, {1024: 10.56, 2048: 12.71, 4096: 13.85, 8192: 14.38, 10240: 14.51})
_V100_PRODUCTS = {
    "float16": _squares(125, {512: 19.87, 1024: 57.30, 2048: 78.23, 4096: 95.73, 8192: 97.36}),
    "bfloat16": _squares(15.7, {1024: 7.78, 2048: 8.99, 4096: 10.53, 8192: 10.65}),
    "float32": _V100_FLOAT32,
    "float64": _V100_FLOAT32,
}

# On a V100 fused attention is about as fast as separate products and a softmax (forward: 4 and 5 %
# slower at the median, backward 15 and 30 %; github.com/facebookresearch/xformers pull 362). Done
# separately, a head of 64 features with 1,024 tokens takes two products and four passes over the
# scores: 268 MFLOP in 10.5 us (float16), in 21 + 21 us (float32): 0.2 and 0.4 of the peaks.
_V100_ATTENTION = {
    **_by_dtype(_flat(0.2), _flat(FUSED_ELSEWHERE)),
    "bfloat16": _flat(FUSED_ELSEWHERE),
}

# torch 2.8 on an A100-PCIE-40GB, the same collection's issue 108. float16 and bfloat16 run alike;
# the faster figure is taken. That card is limited to 250 W, an SXM card to 400 W. The best product
# of all shapes reaches 271.2 TFLOP/s there and 252.9 on a PCIe card (the table of achievable
# products in compute/accelerator of github.com/stas00/ml-engineering), so the products that power
# limits, of 2,048 rows and more, are taken to be faster by as much. float64 is assumed to reach the
# shares of float32.
_SXM = 271.2 / 252.9
_A100_PRODUCTS = _by_dtype(
    _squares(312, {1024: 94.89, 2048: 214.73 * _SXM, 4096: 241.49 * _SXM}),
    _squares(19.5, {1024: 8.99, 2048: 9.69, 4096: 15.52, 8192: 17.56}),
)

# Forward and backward together: FlashAttention-2 (Dao 2023) reaches 0.5 to 0.73 forward and less
# backward, from which 0.5 is taken.
_A100_ATTENTION = _by_dtype(_flat(0.5), _flat(FUSED_ELSEWHERE))

# float32: torch 2.7 on an H100 80GB HBM3, the same collection's issue 79; float64 assumed alike.
# bfloat16: XLA's table of cuBLAS products for this architecture (openxla/xla,
# service/gpu/model/matmul_interpolator_data.h, sm_90), in which products of equal operations and
# other shapes differ by up to 30 %; its 9.0 us for 2.1 GFLOP stands for 1,024 rows. float16 alike.
_H100_PRODUCTS = _by_dtype(
    _squares(989.5, {512: 42.4, 1024: 238.8, 2048: 632.0, 4096: 783.3}),
    _squares(67, {1024: 37.39, 2048: 49.58, 4096: 51.88}),
)

# torch's own fused attention, forward, 1,024 to 16,384 tokens: 287 to 304 TFLOP/s
# (github.com/pytorch/benchmark pull 2296).
_H100_ATTENTION = _by_dtype(_flat(0.3), _flat(FUSED_ELSEWHERE))

# Memory: 795 GB/s of a copy on a V100-SXM2-32GB (github.com/pc2/GPUInspector.jl, docs/src/devices);
# an H100 is assumed to reach the same share. Small passes are slow only because of their launch,
# which takes as long as 4 MB at this speed. A100: fitted to measured steps, as ``ISSUE_SECS``;
# it stands for softmax, dropout and norms as much as for copies.
_MEMORY, _A100_MEMORY = _flat(0.88), _flat(0.6875)


def _gpu(
    name: str,
    tflops: dict[str, float],
    gb_per_sec: float,
    gib: int,
    host: tuple[float, float],
    products: dict[str, Reach],
    attention: dict[str, Reach],
    memory: Reach = _MEMORY,
) -> DeviceProfile:
    """A device. Peaks are dense.

    ``host`` has one direction of the PCIe link, as the vendor states it, and an eighth of the host
    memory's bandwidth of NVIDIA's server with eight devices.
    """
    return DeviceProfile(
        name,
        {dtype: 1e12 * value for dtype, value in tflops.items()},
        1e9 * gb_per_sec,
        gib << 30,
        host_bytes_per_sec=1e9 * host[0],
        host_memory_bytes_per_sec=1e9 * host[1],
        launch_secs=LAUNCH_SECS,
        products=products,
        attention=attention,
        memory=memory,
    )


# NVIDIA V100 data sheet (2020), SXM2: 125 TFLOP/s tensor cores, 15.7 single, 7.8 double;
# 900 GB/s of HBM2, 32 GB; PCIe 3.0 x16, 32 GB/s both directions. bfloat16 has no tensor cores
# there: it runs at single precision. DGX-1: two Xeon E5-2698 v4 of four channels DDR4-2400.
_V100 = _gpu(
    "V100-32GB",
    {"float16": 125, "bfloat16": 15.7, "float32": 15.7, "float64": 7.8}, 900, 32, (16, 19),
    _V100_PRODUCTS, _V100_ATTENTION,
)  # fmt: skip

# NVIDIA A100 data sheet (2021), 80GB SXM: 312 TFLOP/s of float16 and bfloat16, 19.5 single
# (156 with TF32, which torch leaves off), 19.5 double; 2039 GB/s; PCIe 4.0, 64 GB/s both ways.
# DGX A100: two EPYC 7742 of eight channels DDR4-3200.
_A100 = _gpu(
    "A100-80GB",
    {"float16": 312, "bfloat16": 312, "float32": 19.5, "float64": 19.5}, 2039, 80, (32, 51),
    _A100_PRODUCTS, _A100_ATTENTION, _A100_MEMORY,
)  # fmt: skip

# NVIDIA H100 data sheet (2023), SXM: 1979 TFLOP/s of float16 and bfloat16 with sparsity, half
# without; 67 single, 67 double tensor; 3350 GB/s, 80 GB; PCIe 5.0, 128 GB/s both.
# DGX H100: two Xeon 8480C of eight channels DDR5-4800.
_H100 = _gpu(
    "H100-80GB",
    {"float16": 989.5, "bfloat16": 989.5, "float32": 67, "float64": 67}, 3350, 80, (64, 77),
    _H100_PRODUCTS, _H100_ATTENTION,
)  # fmt: skip


def _eager(profile: DeviceProfile) -> DeviceProfile:
    """The device, driven by a host that launches kernel by kernel from Python."""
    name = f"{profile.name}, eager"
    return replace(profile, name=name, issue_secs=ISSUE_SECS, action_secs=ACTION_SECS)


_GPUS = {"v100": _V100, "a100": _A100, "h100": _H100}

PROFILES = {**_GPUS, **{f"{name}-eager": _eager(profile) for name, profile in _GPUS.items()}}
"""Devices whose hosts are never late, as with CUDA graphs or large kernels, and ``-eager`` ones."""


def profile_of(name: str) -> DeviceProfile:
    """The preset of this name.

    Raises:
        PlanError: there is no preset of that name.
    """
    return PROFILES[one_of("profile", name, PROFILES)]
