"""Bits for each layer of a model, chosen by what its predictions lose."""

from .budgets import Budget, BytesBudget, DivergenceBudget
from .calibrating import calibrate
from .result import Calibration, MeasuredSetting
from .sensitivities import Sensitivity

__all__ = [
    "Budget",
    "BytesBudget",
    "Calibration",
    "DivergenceBudget",
    "MeasuredSetting",
    "Sensitivity",
    "calibrate",
]
