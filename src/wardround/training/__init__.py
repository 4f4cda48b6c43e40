"""Local training: one process's model and optimizer, lent to each of its clients in turn.

`Workbench.fit` is the only training loop, a `Learner` what it trains; `device` turns the `compute` settings
into choices for this machine, `cuda_graphs` makes steps fast.
"""
