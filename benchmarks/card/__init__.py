"""What a GPU is held against what it can do at best: the machine, the shape, the arithmetic."""
