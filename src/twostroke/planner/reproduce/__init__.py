"""What the planner says, held against runs: `twostroke bench reproduce what-if` and `doctor`."""
