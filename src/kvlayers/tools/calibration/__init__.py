"""Chooses the bits of each layer by how much the model's predictions change."""

from kvlayers.tools.calibration.calibrator import Calibration, MeasuredSetting, calibrate
from kvlayers.tools.calibration.checks import Budget, BytesBudget, DivergenceBudget
from kvlayers.tools.calibration.settings import Sensitivity

__all__ = [
    "Budget",
    "BytesBudget",
    "Calibration",
    "DivergenceBudget",
    "MeasuredSetting",
    "Sensitivity",
    "calibrate",
]
