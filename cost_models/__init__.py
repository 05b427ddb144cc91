"""Pure cost models: seconds and bytes of a training step per plan. NumPy and the standard library only."""

from cost_models.calibrate_io import Calibration, calibration_toml, load_calibration
from cost_models.terms.compute import op_seconds

__all__ = ["Calibration", "calibration_toml", "load_calibration", "op_seconds"]
