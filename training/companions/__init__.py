"""The companions of the embedded model that draft for it: a small model, Medusa's heads and an EAGLE-3 layer."""
