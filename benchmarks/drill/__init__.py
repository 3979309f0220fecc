"""The drill of two pools: processes are killed and frozen while streams run."""
