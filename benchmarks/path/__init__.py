"""Size of the code that a plain request runs through."""
