"""Auto: our own planner, for degrees, schedules, splits, storage, recomputation and overlap."""

from superscaler_core.planners.auto.auto import Proposals, Settings, auto, options_of
from superscaler_core.planners.auto.setting import Setting

__all__ = ["Proposals", "Setting", "Settings", "auto", "options_of"]
