"""Auto: our planner, over degrees, schedules, splits, storage, recomputation and overlap."""

from superscaler_core.planners.auto.auto import auto
from superscaler_core.planners.auto.setting import Setting

__all__ = ["Setting", "auto"]
