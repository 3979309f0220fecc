"""What steps really take beside what was predicted, learned while they run.

    measured = fixed_s + factor x predicted

A model that was fitted on this machine has fixed_s near 0 and a factor near 1, and both move with its clock. What the
machine could do at best knows nothing of the time that every step takes whatever is in it: then fixed_s is most of a
short step, and a factor alone would make long ones look as bad as short ones.

Least squares of the relative error with exponential forgetting (Haykin, Adaptive Filter Theory, chapter 10).
"""

from __future__ import annotations

_KEPT = 0.99
"""What a step weighs one step later."""
_SPREAD = 1e-2
"""Relative variance of the predictions below which there is no telling a fixed time from a factor."""


class StepCorrection:
    """Learns from (predicted, measured) and corrects predictions."""

    __slots__ = ("_w", "_wx", "_wxx", "_wxy", "_wy", "factor", "fixed_s")

    def __init__(self) -> None:
        self._w = self._wx = self._wxx = self._wy = self._wxy = 0.0
        self.fixed_s = 0.0
        self.factor = 1.0

    def seconds(self, predicted_s: float) -> float:
        """As corrected."""
        return self.fixed_s + self.factor * predicted_s

    def learn(self, predicted_s: float, measured_s: float) -> None:
        """Takes in a step; both are more than 0."""
        weight = 1 / (predicted_s * measured_s)  # of the relative error
        self._w = _KEPT * self._w + weight
        self._wx = _KEPT * self._wx + weight * predicted_s
        self._wxx = _KEPT * self._wxx + weight * predicted_s * predicted_s
        self._wy = _KEPT * self._wy + weight * measured_s
        self._wxy = _KEPT * self._wxy + weight * predicted_s * measured_s
        spread = self._w * self._wxx - self._wx * self._wx
        factor = 0.0
        if spread > _SPREAD * self._wx * self._wx:
            factor = (self._w * self._wxy - self._wx * self._wy) / spread
            self.fixed_s = (self._wy - factor * self._wx) / self._w
        if factor <= 0 or self.fixed_s < 0:
            self.fixed_s, factor = 0.0, self._wxy / self._wxx
        self.factor = factor
