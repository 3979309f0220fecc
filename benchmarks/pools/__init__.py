"""Engines, as one process or pools, compared under the same requests through EngineClient."""
