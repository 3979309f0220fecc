"""What runs in the interpreter of another engine: `driver_loop.py` there imports a driver and lets its engine answer.

A driver may use the standard library and its engine; nothing of twostroke, which the engine's environment does not
have.
"""
