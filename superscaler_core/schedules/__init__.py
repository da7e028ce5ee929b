"""Pipeline schedules as values: which worker runs which stage and microbatch, in which order.

>>> print(grid(SCHEDULES["gpipe"](2, 3)))
gpipe: makespan 8, idle 1/4 of it, peak microbatches 3 3
time      0  1  2  3  4  5  6  7
worker 0 F0 F1 F2 -- -- B0 B1 B2
worker 1 -- F0 F1 F2 B0 B1 B2 --
"""

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.dualpipe import dualpipe, dualpipe_v
from superscaler_core.schedules.errors import ScheduleError
from superscaler_core.schedules.grid import grid
from superscaler_core.schedules.interlaced import interlaced, interlaced_edges
from superscaler_core.schedules.interleaved import interleaved, looped_bfs
from superscaler_core.schedules.nf1b import nf1b
from superscaler_core.schedules.schedule import Schedule, WorkerRoute, held_by
from superscaler_core.schedules.split_backward import on_one_worker, recompute_apart, split_backward
from superscaler_core.schedules.straight import alternate, gpipe, naive, one_f_one_b
from superscaler_core.schedules.table import SCHEDULES, Generator, generate
from superscaler_core.schedules.timeline import EQUAL, Durations, Span, Time, Timeline, timeline
from superscaler_core.schedules.versions import GRADS, WeightRule
from superscaler_core.schedules.zero_bubble import zero_bubble, zero_bubble_h2, zero_bubble_v

__all__ = [
    "EQUAL",
    "GRADS",
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Durations",
    "Generator",
    "Schedule",
    "ScheduleError",
    "Span",
    "Time",
    "Timeline",
    "WeightRule",
    "WorkerRoute",
    "alternate",
    "dualpipe",
    "dualpipe_v",
    "generate",
    "gpipe",
    "grid",
    "held_by",
    "interlaced",
    "interlaced_edges",
    "interleaved",
    "looped_bfs",
    "naive",
    "nf1b",
    "on_one_worker",
    "one_f_one_b",
    "recompute_apart",
    "split_backward",
    "timeline",
    "zero_bubble",
    "zero_bubble_h2",
    "zero_bubble_v",
]
