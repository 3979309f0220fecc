"""The real scheduler in simulated time: what-ifs on a recorded log or a trace, by a step-time model."""
