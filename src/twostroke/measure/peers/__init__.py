"""Engines side by side: the same work on the same weights, each in its own process and its own environment."""
