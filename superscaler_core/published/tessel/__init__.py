"""Search for schedules: a short order of actions for given times, memory limits and routes.

The example is a V: each worker holds two stages, one on the way down and one on the way back.

>>> from superscaler_core.schedules import grid, timeline
>>> times = {"F": 1, "I": 1, "W": 1}
>>> found = search_schedule(v_routes(2), times, 3, memory_limit=4)
>>> timeline(found, times).makespan
19
"""

from superscaler_core.published.tessel.exact import exact_schedule, is_shortest
from superscaler_core.published.tessel.routes import (
    both_ways,
    looped_routes,
    straight_routes,
    v_routes,
)
from superscaler_core.published.tessel.search import search_schedule

__all__ = [
    "both_ways",
    "exact_schedule",
    "is_shortest",
    "looped_routes",
    "search_schedule",
    "straight_routes",
    "v_routes",
]
