"""Pure cost models: seconds and bytes of a training step per plan. NumPy and the standard library only."""

from cost_models.calibrate_io import Calibration, calibration_toml, load_calibration
from cost_models.estimate import estimate, estimate_rows
from cost_models.stages import StageSplit, stage_split
from cost_models.terms.compute import op_seconds
from cost_models.traits import Runtime, load_runtime, runtime_names
from cost_models.transformer import TransformerShape, transformer_workload

__all__ = [
    "Calibration",
    "Runtime",
    "StageSplit",
    "TransformerShape",
    "calibration_toml",
    "estimate",
    "estimate_rows",
    "load_calibration",
    "load_runtime",
    "op_seconds",
    "runtime_names",
    "stage_split",
    "transformer_workload",
]
