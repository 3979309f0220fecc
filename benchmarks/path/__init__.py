"""How much of the package a plain request runs through."""
