"""Companions, the drafters for the embedded model: a small draft model, Medusa heads and an EAGLE-3 head."""
