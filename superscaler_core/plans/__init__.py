"""sPrograms: functions that fill a plan, one file per plan, with their usual names.

An sProgram takes a ``Plan`` and decides, by ``op_trans``, ``op_assign`` and ``op_order``, what its
devices do. Further arguments are its options, values with a default. Code that several plans share
is in ``pieces``.
"""

from superscaler_core.plans.table import PLANS

__all__ = ["PLANS"]
