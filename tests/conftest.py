"""Hypothesis profiles: `ci` repeats itself exactly; `--hypothesis-profile=soak` runs 50 times as many examples."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
_EXAMPLES = 60

settings.register_profile("ci", max_examples=_EXAMPLES, deadline=None, derandomize=True, suppress_health_check=_CALM)
settings.register_profile("soak", max_examples=50 * _EXAMPLES, deadline=None, suppress_health_check=_CALM)
settings.load_profile("ci")
