"""Validate: a plan is complete, possible, and fits the devices' memory."""

from superscaler_core.validate.coverage import check_assigned, check_coverage

__all__ = ["check_assigned", "check_coverage"]
