"""The table of plans: every sProgram by its name."""

from collections.abc import Callable

from superscaler_core.plans.accumulate import accumulate
from superscaler_core.plans.asynchronous import ampnet, pipedream, pipedream_2bw, pipemare
from superscaler_core.plans.branch_parallel import branch_parallel
from superscaler_core.plans.chimera import chimera
from superscaler_core.plans.coshard import coshard
from superscaler_core.plans.dap import dap
from superscaler_core.plans.dap_pipeline import dap_pipeline
from superscaler_core.plans.data_parallel import data_parallel
from superscaler_core.plans.dualpipe import dualpipe
from superscaler_core.plans.dualpipe_v import dualpipe_v
from superscaler_core.plans.expert_parallel import expert_parallel
from superscaler_core.plans.gpipe import gpipe
from superscaler_core.plans.hybrid import hybrid
from superscaler_core.plans.interlaced import interlaced
from superscaler_core.plans.interleaved import interleaved
from superscaler_core.plans.megatron import megatron
from superscaler_core.plans.megatron_sp import megatron_sp
from superscaler_core.plans.mesh_2d import mesh_2d
from superscaler_core.plans.mesh_tf import mesh_tf
from superscaler_core.plans.nf1b import nf1b
from superscaler_core.plans.one_f_one_b import one_f_one_b
from superscaler_core.plans.recompute import recompute
from superscaler_core.plans.searched import searched
from superscaler_core.plans.sequence_parallel import sequence_parallel
from superscaler_core.plans.spatial import spatial
from superscaler_core.plans.swap import swap
from superscaler_core.plans.terapipe import terapipe
from superscaler_core.plans.zero1 import zero1
from superscaler_core.plans.zero2 import zero2
from superscaler_core.plans.zero3 import zero3
from superscaler_core.plans.zero3_offload import zero3_offload
from superscaler_core.plans.zero_bubble import zero_bubble
from superscaler_core.plans.zero_bubble_v import zero_bubble_v
from superscaler_core.plans.zero_offload import zero_offload

PLANS: dict[str, Callable[..., None]] = {
    "data_parallel": data_parallel,
    "accumulate": accumulate,
    "megatron": megatron,
    "sequence_parallel": sequence_parallel,
    "megatron_sp": megatron_sp,
    "expert_parallel": expert_parallel,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "recompute": recompute,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zero_bubble_v": zero_bubble_v,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "dualpipe_v": dualpipe_v,
    "searched": searched,
    "terapipe": terapipe,
    "pipedream": pipedream,
    "pipedream_2bw": pipedream_2bw,
    "ampnet": ampnet,
    "pipemare": pipemare,
    "interlaced": interlaced,
    "hybrid": hybrid,
    "dap": dap,
    "dap_pipeline": dap_pipeline,
    "branch_parallel": branch_parallel,
    "nf1b": nf1b,
    "coshard": coshard,
    "mesh_2d": mesh_2d,
    "mesh_tf": mesh_tf,
    "zero_offload": zero_offload,
    "zero3_offload": zero3_offload,
    "swap": swap,
    "spatial": spatial,
}
"""All sPrograms by name."""
