"""Calibration: the links of this cluster, measured by transfers and fitted to the cost model."""

from rvdcomm.calibration.calibrate import calibrate
from rvdcomm.calibration.fit import Fit, LevelFit, Sample, fit_links

__all__ = ["Fit", "LevelFit", "Sample", "calibrate", "fit_links"]
