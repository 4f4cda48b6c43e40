"""Whether a machine is ready to use its kit: the checks, by what they look at.

`sequence.preflight` runs them all; the light commands (`status`, `stop`) use kit.py and connection.py alone,
which import neither torch nor the engine.
"""
