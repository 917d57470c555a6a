"""The public names of the lab, each imported when it is first asked for, as torch takes seconds to import."""

from .calibration import BytesBudget, Calibration, DivergenceBudget, MeasuredSetting, Sensitivity, calibrate
from .evaluation.engine import score
from .evaluation.requests import ContinuationScore

__all__ = [
    "BytesBudget",
    "Calibration",
    "ContinuationScore",
    "DivergenceBudget",
    "MeasuredSetting",
    "Sensitivity",
    "calibrate",
    "score",
]
