"""Planners: from a request to candidates, and the search that tries them."""

from superscaler_core.planners.auto.families import Filling, powers
from superscaler_core.planners.auto.options import SettingSpace
from superscaler_core.planners.row import PlannerRow
from superscaler_core.planners.search import search_request
from superscaler_core.planners.table import PLANNERS

__all__ = ["PLANNERS", "Filling", "PlannerRow", "SettingSpace", "powers", "search_request"]
