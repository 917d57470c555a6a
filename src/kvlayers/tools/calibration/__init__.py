"""Chooses the bits of each layer by how much the model's predictions change."""

from kvlayers.tools.calibration.budgets import Budget, BytesBudget, DivergenceBudget
from kvlayers.tools.calibration.calibrator import calibrate
from kvlayers.tools.calibration.result import Calibration, MeasuredSetting
from kvlayers.tools.calibration.sensitivities import Sensitivity

__all__ = [
    "Budget",
    "BytesBudget",
    "Calibration",
    "DivergenceBudget",
    "MeasuredSetting",
    "Sensitivity",
    "calibrate",
]
