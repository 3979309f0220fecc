"""The version of the package, by itself: reading it loads nothing."""

__version__ = "0.1.0"
