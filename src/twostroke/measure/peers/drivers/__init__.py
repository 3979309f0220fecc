"""What runs in the interpreters of the engines that are compared, ours included: one module for each engine.

A driver may use the standard library, its engine, and `driver_loop` beside it; nothing of twostroke, which the engine's
environment does not have (`twostroke_driver` is the exception: it drives twostroke). `start.py` makes this folder a
package of its own there.
"""
