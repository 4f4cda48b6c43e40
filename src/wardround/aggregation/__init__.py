"""How a server joins the params of its clients: `mean` (and how far each client moved), `weights` (which
sum to one), `robust` (trimmed mean, median, Krum, geometric median). All work on pieces of tensors, so that
no rule holds all models in memory.
"""
