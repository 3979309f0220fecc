"""Code that runs in the interpreter of another engine: `driver_loop.py` imports a driver there and serves its engine.

A driver may use the standard library and its engine, but nothing of twostroke, which that environment does not have.
"""
