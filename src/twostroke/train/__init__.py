"""Training of Medusa heads for a frozen model."""
