"""sPrograms: functions that fill a plan; a file each, by the names people use for them.

An sProgram takes a ``Plan`` and decides, by ``op_trans``, ``op_assign`` and ``op_order``, what its
devices do; further arguments are its *knobs*, values with a default. What several of them are made
of is in ``pieces``.
"""

from superscaler_core.plans.table import PLANS

__all__ = ["PLANS"]
