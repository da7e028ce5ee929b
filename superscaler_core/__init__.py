"""superscaler_core: turns a PyTorch model and an sProgram into a parallel training program.

``rvdcomm`` plans and runs the communication between parts; this package calls no transport.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from superscaler_core.compiled import Compiled, compile
from superscaler_core.errors import (
    AnnotationError,
    CaptureError,
    CoverageError,
    DeviceMemoryError,
    OpaqueWarning,
    OrderError,
    PlanError,
)
from superscaler_core.graph.annotation import Annotation
from superscaler_core.graph.blocks import Blocks, find_blocks
from superscaler_core.graph.builder import GraphBuilder
from superscaler_core.graph.dims import DimClass, Dims
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.modules import Modules
from superscaler_core.graph.part import Part
from superscaler_core.graph.shard_spec import ShardSpec
from superscaler_core.graph.tensor import PTensor, VTensor
from superscaler_core.plan import (
    Axis,
    Decisions,
    Keep,
    OpSplit,
    Overlap,
    Placement,
    Plan,
    Stage,
)
from superscaler_core.plan.op_trans import pieces, replicate, split
from superscaler_core.precision import Precision
from superscaler_core.program import StepProgram
from superscaler_core.schedules import SCHEDULES, Schedule, ScheduleError

if TYPE_CHECKING:
    from superscaler_core import cost, optim
    from superscaler_core.cost import CostModel
    from superscaler_core.evaluation.found import Found
    from superscaler_core.evaluation.search_options import Search
    from superscaler_core.front_end import capture
    from superscaler_core.front_end.modules import register_module
    from superscaler_core.front_end.shard import shard
    from superscaler_core.hugging_face import config_of_plan
    from superscaler_core.ops.stacked_experts import stack_experts
    from superscaler_core.parallel import (
        Batch,
        Callback,
        Parallel,
        Stats,
        StepStats,
        TensorBoardWriter,
        WandbWriter,
        parallelize,
    )
    from superscaler_core.planners.search import search
    from superscaler_core.rules.register import register_op
    from superscaler_core.simulator import DeviceProfile, simulate
    from superscaler_core.training.flight_record import dump_flight_record
    from superscaler_core.training.live_bytes import LiveBytes
    from superscaler_core.training.load import load, run_threads
    from superscaler_core.training.resume import latest, load_run
    from superscaler_core.training.trainer import Trainer
    from superscaler_core.training.training_state import save_run

_LAZY = {
    "Batch": "superscaler_core.parallel",
    "Callback": "superscaler_core.parallel",
    "CostModel": "superscaler_core.cost",
    "DeviceProfile": "superscaler_core.simulator",
    "Found": "superscaler_core.evaluation.found",
    "LiveBytes": "superscaler_core.training.live_bytes",
    "Parallel": "superscaler_core.parallel",
    "Search": "superscaler_core.evaluation.search_options",
    "Stats": "superscaler_core.parallel",
    "StepStats": "superscaler_core.parallel",
    "TensorBoardWriter": "superscaler_core.parallel",
    "Trainer": "superscaler_core.training.trainer",
    "WandbWriter": "superscaler_core.parallel",
    "capture": "superscaler_core.front_end",
    "config_of_plan": "superscaler_core.hugging_face",
    "dump_flight_record": "superscaler_core.training.flight_record",
    "latest": "superscaler_core.training.resume",
    "load": "superscaler_core.training.load",
    "load_run": "superscaler_core.training.resume",
    "parallelize": "superscaler_core.parallel",
    "register_module": "superscaler_core.front_end.modules",
    "register_op": "superscaler_core.rules.register",
    "run_threads": "superscaler_core.training.load",
    "save_run": "superscaler_core.training.training_state",
    "search": "superscaler_core.planners.search",
    "shard": "superscaler_core.front_end.shard",
    "stack_experts": "superscaler_core.ops.stacked_experts",
    "simulate": "superscaler_core.simulator",
}
"""Public names whose modules need torch or are slow to import; each is imported on first use."""

__all__ = [
    "SCHEDULES",
    "Annotation",
    "AnnotationError",
    "Axis",
    "Batch",
    "Blocks",
    "Callback",
    "CaptureError",
    "Compiled",
    "CostModel",
    "CoverageError",
    "Decisions",
    "DeviceMemoryError",
    "DeviceProfile",
    "DimClass",
    "Dims",
    "Found",
    "Graph",
    "GraphBuilder",
    "Keep",
    "LiveBytes",
    "Modules",
    "Op",
    "OpSplit",
    "OpaqueWarning",
    "OrderError",
    "Overlap",
    "PTensor",
    "Parallel",
    "Part",
    "Placement",
    "Plan",
    "PlanError",
    "Precision",
    "Schedule",
    "ScheduleError",
    "Search",
    "ShardSpec",
    "Stage",
    "Stats",
    "StepProgram",
    "StepStats",
    "TensorBoardWriter",
    "Trainer",
    "VTensor",
    "WandbWriter",
    "capture",
    "compile",
    "config_of_plan",
    "cost",
    "dump_flight_record",
    "find_blocks",
    "latest",
    "load",
    "load_run",
    "optim",
    "parallelize",
    "pieces",
    "register_module",
    "register_op",
    "replicate",
    "run_threads",
    "save_run",
    "search",
    "shard",
    "simulate",
    "split",
    "stack_experts",
]


_MOVED = {"PipeMare": "superscaler_core.published.asynchronous"}
"""Earlier public names, with where they are now; they can be used for one release more."""


def __getattr__(name: str) -> Any:
    import importlib
    import warnings

    if name in _MOVED:
        said = f"superscaler_core.{name} has moved: import it from {_MOVED[name]}."
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(_MOVED[name]), name)
    if name in ("cost", "optim"):
        return importlib.import_module(f"superscaler_core.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'superscaler_core' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
