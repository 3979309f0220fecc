"""Other engines for comparison: the same work on the same weights, each in its own process and environment."""
