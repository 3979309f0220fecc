"""README's tables of measurements, rendered from the committed results: no figure is typed by hand."""
