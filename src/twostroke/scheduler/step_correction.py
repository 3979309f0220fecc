"""Correction of predicted step times by measured ones, learned while steps run.

    measured = fixed_s + factor x predicted

For a model that was fitted on this machine, fixed_s is near 0 and the factor near 1, and both follow the machine's
clock. A prediction from the machine's limits ignores the time that every step takes regardless of its work. Then
fixed_s is most of a short step, and a factor alone would overestimate long steps as much as it corrects short ones.
Least squares of the relative error with exponential forgetting (Haykin, Adaptive Filter Theory, chapter 10).
"""

from __future__ import annotations

_KEPT = 0.99
"""Weight of a step one step later."""
_SPREAD = 1e-2
"""Relative variance of the predictions below which a fixed time cannot be separated from a factor."""


class StepCorrection:
    """Linear correction that learns from (predicted, measured)."""

    __slots__ = ("_w", "_wx", "_wxx", "_wxy", "_wy", "factor", "fixed_s")

    def __init__(self) -> None:
        self._w = self._wx = self._wxx = self._wy = self._wxy = 0.0
        self.fixed_s = 0.0
        self.factor = 1.0

    def seconds(self, predicted_s: float) -> float:
        """Return the corrected prediction."""
        return self.fixed_s + self.factor * predicted_s

    def learn(self, predicted_s: float, measured_s: float) -> None:
        """Learn from a step; both times are above 0."""
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
