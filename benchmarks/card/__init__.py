"""Measurements of a GPU against its limits: the machine, the model shapes, the arithmetic."""
