"""Simulation of recorded logs and traces: the real scheduler in simulated time, with a step-time model."""
