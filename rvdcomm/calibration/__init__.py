"""Calibration: measure the links of a cluster, and measure which plan is the fastest on it."""

from rvdcomm.calibration.calibrate import Effort, calibrate
from rvdcomm.calibration.fit import Fit, LevelFit, Sample, fit_links
from rvdcomm.calibration.hosts import HostRates, compared
from rvdcomm.calibration.report import differences, table
from rvdcomm.calibration.tune import Tuned, tune
from rvdcomm.calibration.winners import Winner, log
from rvdcomm.calibration.worlds import spawned

__all__ = [
    "Effort",
    "Fit",
    "HostRates",
    "LevelFit",
    "Sample",
    "Tuned",
    "Winner",
    "calibrate",
    "compared",
    "differences",
    "fit_links",
    "log",
    "spawned",
    "table",
    "tune",
]
