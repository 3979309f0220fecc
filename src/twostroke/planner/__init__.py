"""Prediction before and beside serving: plans, what-ifs on recorded runs, and which lever to pull."""
