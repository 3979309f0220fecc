"""Predictions: plans before a start, what-ifs on recorded runs, and diagnoses with levers."""
