"""The tables of README and docs/measurements.md, rendered from the committed results: no figure is typed by hand."""
