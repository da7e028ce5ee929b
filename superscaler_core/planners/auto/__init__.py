"""Auto: our planner, over degrees, schedules, splits, storage, recomputation and overlap."""

from superscaler_core.planners.auto.auto import Settings, auto, options_of, propose_settings
from superscaler_core.planners.auto.setting import Setting

__all__ = ["Setting", "Settings", "auto", "options_of", "propose_settings"]
