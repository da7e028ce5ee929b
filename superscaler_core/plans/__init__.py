"""sPrograms: functions that fill a plan; a file each, by the names people use for them.

An sProgram takes a ``Plan`` and decides, by ``op_trans``, ``op_assign`` and ``op_order``, what its
devices do; further arguments are its *knobs*, numbers or words with a default.
"""

from superscaler_core.plans.accumulate import accumulate
from superscaler_core.plans.branch_parallel import branch_parallel
from superscaler_core.plans.coshard import coshard
from superscaler_core.plans.dap import dap
from superscaler_core.plans.dap_pipeline import dap_pipeline
from superscaler_core.plans.data_parallel import data_parallel
from superscaler_core.plans.expert_parallel import expert_parallel
from superscaler_core.plans.gpipe import gpipe
from superscaler_core.plans.hybrid import hybrid
from superscaler_core.plans.interlaced import interlaced
from superscaler_core.plans.interleaved import interleaved
from superscaler_core.plans.megatron import megatron
from superscaler_core.plans.megatron_sp import megatron_sp
from superscaler_core.plans.mesh_2d import mesh_2d
from superscaler_core.plans.nf1b import nf1b
from superscaler_core.plans.one_f_one_b import one_f_one_b
from superscaler_core.plans.recompute import recompute
from superscaler_core.plans.sequence_parallel import sequence_parallel
from superscaler_core.plans.spatial import spatial
from superscaler_core.plans.swap import swap
from superscaler_core.plans.table import PLANS
from superscaler_core.plans.zero1 import zero1
from superscaler_core.plans.zero2 import zero2
from superscaler_core.plans.zero3 import zero3
from superscaler_core.plans.zero3_offload import zero3_offload
from superscaler_core.plans.zero_offload import zero_offload

__all__ = [
    "PLANS",
    "accumulate",
    "branch_parallel",
    "coshard",
    "dap",
    "dap_pipeline",
    "data_parallel",
    "expert_parallel",
    "gpipe",
    "hybrid",
    "interlaced",
    "interleaved",
    "megatron",
    "megatron_sp",
    "mesh_2d",
    "nf1b",
    "one_f_one_b",
    "recompute",
    "sequence_parallel",
    "spatial",
    "swap",
    "zero1",
    "zero2",
    "zero3",
    "zero3_offload",
    "zero_offload",
]
