"""Engines behind EngineClient, one process or pools, under the same requests."""
