"""How a server joins the params of its clients: `mean`, `weights` (which sum to one), `updates` (how far
each client moved), `robust` (trimmed mean, median, Krum, geometric median). All work on `pieces` of tensors,
so that no rule holds all models in memory.
"""
