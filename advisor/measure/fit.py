"""Fit the cost model's constants to measured runs: robust least squares on the logarithm of the step time.

A constant of a run is generic x runtime's factor x GPU family's factor. All are fitted in logarithms with a normal prior: generic
values around physical ones, factors around 1, so that a runtime or GPU nobody measured keeps the generic value and five runs can't
ruin anything. Residuals are soft-L1 with a scale of 10%: a run three times slower than its like (they exist) pulls like a small miss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from advisor.measure.runs import RunTable
from cost_models.calibrate_io import Calibration
from cost_models.estimate import pack_rows
from cost_models.pack import Packed
from cost_models.price import price
from cost_models.types import FloatArray

#: Constants that are fitted: physical prior and standard deviation of its logarithm. All others keep their shipped value: runs don't
#: identify them.
PRIORS: Mapping[str, tuple[float, float]] = {
    "gemm_rate_share": (0.80, 0.1), "gemm_half_m": (60.0, 0.3), "gemm_half_n": (120.0, 0.5), "gemm_half_k": (120.0, 0.5),
    "low_precision_rate_share": (0.75, 0.15), "convolution_rate_share": (0.28, 0.2), "tf32_convolution_gain": (1.3, 0.15), "map_traffic": (1.1, 0.1),
    "attention_rate_share": (0.5, 0.25), "attention_half_rows": (500.0, 0.5),
    "batched_rate_share": (0.45, 0.3), "expert_imbalance": (1.2, 0.2), "memory_rate_share": (0.8, 0.1), "memory_traffic": (1.2, 0.4),
    "host_s_per_kernel": (30e-6, 0.2), "host_s_per_collective": (70e-6, 0.5), "backward_launch_share": (1.0, 0.3),
    "intra_latency_s": (25e-6, 0.5), "step_s": (6e-3, 0.4), "scalar_rate_share": (0.85, 0.15), "intra_rate_share": (0.65, 0.2), "pcie_rate_share": (0.4, 0.3),
    "inter_rate_share": (0.65, 0.25), "tcp_bytes_per_s": (7e9, 0.3), "reduction_rate_share": (0.8, 0.3), "inter_decay": (0.2, 0.5), "inter_decay_whole_node": (0.4, 0.5),
    "inter_latency_s_per_node": (60e-6, 0.6), "inter_latency_growth": (1.2, 0.15), "dp_hidden_share": (0.6, 0.3), "fsdp_hidden_share": (0.8, 0.2),
    "overlap_contention": (0.2, 0.6), "p2p_rate_share": (0.5, 0.4), "all_to_all_rate_share": (0.75, 0.2),
}  # fmt: skip
#: Which vary by runtime and by GPU family, and how far (standard deviation of the logarithm).
BY_RUNTIME: Mapping[str, float] = {
    "gemm_rate_share": 0.10, "host_s_per_kernel": 0.3, "step_s": 0.4, "inter_rate_share": 0.4, "intra_rate_share": 0.2,
    "inter_latency_s_per_node": 0.8, "intra_latency_s": 0.8, "reduction_rate_share": 0.3, "attention_rate_share": 0.2,
}  # fmt: skip
BY_FAMILY: Mapping[str, float] = {"gemm_rate_share": 0.15, "attention_rate_share": 0.25, "convolution_rate_share": 0.2}
#: Factors known before any run: largest product measured on such cards over that of an H100 (stas00/ml-engineering, MAMF table), the same
#: of fused attention (63% of an A100's peak, Dao 2023; 58% of an H100's, Shah et al. 2024), and
#: cards whose power limit keeps them far below the clock their peak is quoted at (T4: 70 W, base 585 of 1590 MHz; 500 W H100);
#: fused attention on CDNA reaches less of the peak than cuDNN's (ROCm/flash-attention), CDNA4's products more of it than CDNA3's;
#: GeForce cards accumulate in fp32 at half rate, so that they run near that peak, above the quoted clock.
DEVICE_FACTORS: Mapping[str, Mapping[str, float]] = {
    "ampere": {"gemm_rate_share": 1.08, "attention_rate_share": 1.08}, "blackwell": {"gemm_rate_share": 0.95},
    "cdna3": {"gemm_rate_share": 0.7, "attention_rate_share": 0.7}, "cdna4": {"gemm_rate_share": 0.8, "attention_rate_share": 0.7},
    "t4": {"gemm_rate_share": 0.4, "attention_rate_share": 0.4, "batched_rate_share": 0.4},
    **{card: {"gemm_rate_share": 1.25, "convolution_rate_share": 2.2} for card in
       ("rtx-2070", "rtx-2080-super", "rtx-2080-ti", "rtx-3060", "rtx-3070", "rtx-3080", "rtx-3080-ti", "rtx-3090", "rtx-3090-ti",
        "rtx-4060-ti", "rtx-4070-ti", "rtx-4080", "rtx-4080-super", "rtx-4090", "rtx-5080", "rtx-5090")},
    "h100-sxm-96gb-hbm2e": {"gemm_rate_share": 0.845, "attention_rate_share": 0.845},
}  # fmt: skip
_RUNS_PER_MODEL = 120.0
_SCALE = 0.10  # a miss of 10% weighs like one standard deviation of a prior
_STEP = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One fitted number: the logarithm of a generic constant, or of a runtime's or family's factor."""

    constant: str
    runtime: str = ""
    family: str = ""
    mean: float
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Runs packed once, with what a fit needs of them."""

    packed: Packed
    log_measured: FloatArray
    runtime: np.ndarray  # name as calibrated, per run
    family: np.ndarray
    weight: FloatArray
    base: Calibration  # what isn't fitted

    def log_predicted(self, calibration: Calibration) -> FloatArray:
        """Logarithm of the predicted seconds of every run."""
        parts = price(self.packed, calibration)
        return np.log(sum(parts.values()))


def make_problem(runs: RunTable, base: Calibration) -> Problem:
    """Pack measured runs for fitting. Every run must have a measured step time."""
    packed = pack_rows(runs.workloads, runs.clusters, runs.plans)
    own_name = [r.calibrated_as or r.name for r in packed.runtimes]
    return Problem(
        packed=packed, log_measured=np.log(runs.step_time_s),
        runtime=np.array([own_name[i] for i in runs.plans.runtime]), family=np.array([c.device.family for c in runs.clusters]),
        weight=model_weights(runs.column("source_repo_or_doc", "own"), runs.column("model_name")), base=base,
    )  # fmt: skip


def model_weights(source: np.ndarray, model: np.ndarray) -> FloatArray:
    """Weight per run: all runs of one model from one source together count like at most _RUNS_PER_MODEL.

    They share what the model misses of their shape and machine, so that a thousand of them don't say more than a hundred.
    """
    groups = np.char.add(np.char.add(source.astype(str), "|"), model.astype(str))
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return np.clip(np.sqrt(_RUNS_PER_MODEL / counts[inverse]), 0.15, 1.0)


def parameters(problem: Problem, priors: Mapping[str, tuple[float, float]] = PRIORS) -> list[Parameter]:
    """Everything a full fit moves."""
    out = [Parameter(constant=c, mean=float(np.log(v)), deviation=sd) for c, (v, sd) in priors.items()]
    out += [Parameter(constant=c, runtime=r, mean=0.0, deviation=sd) for c, sd in BY_RUNTIME.items() for r in sorted(set(problem.runtime))]
    for constant, deviation in BY_FAMILY.items():
        for family in sorted(set(problem.family)):
            known = DEVICE_FACTORS.get(family, {}).get(constant, 1.0)
            out.append(Parameter(constant=constant, family=family, mean=float(np.log(known)), deviation=deviation))
    return out


def to_calibration(problem: Problem, params: list[Parameter], x: FloatArray) -> Calibration:
    """Calibration with the fitted numbers in place."""
    constants = dict(problem.base.constants)
    by_runtime = {k: dict(v) for k, v in problem.base.by_runtime.items()}
    by_family = {k: dict(v) for k, v in problem.base.by_family.items()}
    for p, value in zip(params, np.exp(x), strict=True):
        if p.runtime:
            by_runtime.setdefault(p.runtime, {})[p.constant] = float(value)
        elif p.family:
            by_family.setdefault(p.family, {})[p.constant] = float(value)
        else:
            constants[p.constant] = float(value)
    return dataclasses.replace(problem.base, constants=constants, by_runtime=by_runtime, by_family=by_family)


def fit(
    problem: Problem, params: list[Parameter], *, train: np.ndarray | None = None, start: FloatArray | None = None, max_steps: int = 12,
    scale: float = _SCALE, tail: float = np.inf,
) -> FloatArray:  # fmt: skip
    """Fitted logarithms of the parameters.

    Args:
        problem: packed runs.
        params: what to fit.
        train: mask of the runs that count; None: all.
        start: first guess; the priors' means by default.
        max_steps: Gauss-Newton steps.
        scale: miss (share) that weighs like one standard deviation of a prior.
        tail: misses of so many scales and more pull ever less (Cauchy); infinite: all pull like small ones.
    """
    mean, deviation = np.array([p.mean for p in params]), np.array([p.deviation for p in params])
    rows = np.flatnonzero(np.ones(len(problem.weight), dtype=bool) if train is None else train)
    root_weight = problem.weight[rows]
    masks = np.stack([_applies(problem, p)[rows] for p in params])

    def miss(x: FloatArray) -> FloatArray:
        return problem.log_predicted(to_calibration(problem, params, x))[rows] - problem.log_measured[rows]

    def residuals(x: FloatArray) -> FloatArray:
        return np.concatenate([_soften(miss(x) / scale, tail)[0] * root_weight, (x - mean) / deviation])

    def jacobian(x: FloatArray) -> FloatArray:
        at, base = miss(x), to_calibration(problem, params, x)
        slope = _soften(at / scale, tail)[1] * root_weight / scale
        columns = {c: _sensitivity(problem, base, c, at, rows) for c in {p.constant for p in params}}
        data = np.stack([columns[p.constant] * m * slope for p, m in zip(params, masks, strict=True)], axis=1)
        return np.vstack([data, np.diag(1 / deviation)])

    solution = least_squares(residuals, mean if start is None else start, jac=jacobian, x_scale=deviation, max_nfev=max_steps)
    return np.asarray(solution.x, dtype=np.float64)


def _soften(z: FloatArray, tail: float) -> tuple[FloatArray, FloatArray]:
    """Residual whose square is the loss, and its slope: soft-L1, beyond `tail` its logarithm."""
    root = np.sqrt(1 + z * z)
    loss, slope = 2 * (root - 1), 2 * z / root
    if np.isfinite(tail):
        loss, slope = tail**2 * np.log1p(loss / tail**2), slope / (1 + loss / tail**2)
    soft = np.sqrt(loss)
    return np.sign(z) * soft, np.where(np.abs(z) < 1e-6, 1.0, np.abs(slope) / np.maximum(2 * soft, 1e-12))


def _applies(problem: Problem, p: Parameter) -> np.ndarray:
    applies = problem.runtime == p.runtime if p.runtime else problem.family == p.family if p.family else np.ones(len(problem.runtime))
    return np.asarray(applies, dtype=np.float64)


def _sensitivity(problem: Problem, base: Calibration, constant: str, at: FloatArray, rows: np.ndarray) -> FloatArray:
    """Derivative of the log time by the log of a constant. Generic value and factors share it: their logarithms add up."""
    moved = dataclasses.replace(base, constants={**base.constants, constant: base.constants[constant] * float(np.exp(_STEP))})
    return np.asarray((problem.log_predicted(moved)[rows] - problem.log_measured[rows] - at) / _STEP)
