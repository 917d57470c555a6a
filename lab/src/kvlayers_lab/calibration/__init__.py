"""Chooses the bits of each layer by how much the model's predictions change."""

from kvlayers_lab.calibration.calibrator import Calibration, MeasuredSetting, calibrate
from kvlayers_lab.calibration.checks import Budget, BytesBudget, DivergenceBudget
from kvlayers_lab.calibration.settings import Sensitivity

__all__ = [
    "Budget",
    "BytesBudget",
    "Calibration",
    "DivergenceBudget",
    "MeasuredSetting",
    "Sensitivity",
    "calibrate",
]
