"""Seconds that are linear in a step's number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cost_models.types import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of a step with one micro-batch, and what each further one adds."""

    one: FloatArray
    further: FloatArray

    @classmethod
    def once(cls, seconds: FloatArray) -> Seconds:
        """What a step pays once."""
        return cls(one=seconds, further=np.zeros_like(seconds))

    @classmethod
    def each(cls, seconds: FloatArray) -> Seconds:
        """What every micro-batch pays."""
        return cls(one=seconds, further=seconds)

    @classmethod
    def linear(cls, formula: Callable[[FloatArray], FloatArray]) -> Seconds:
        """A formula that is linear in the number of micro-batches."""
        one = formula(np.array(1.0))
        return cls(one=one, further=formula(np.array(2.0)) - one)

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(one=self.one + other.one, further=self.further + other.further)
