"""Comparisons: a grid of ordinary runs, and the tables they give.

sweep.py     the `sweep:` section of a configuration
grid.py      rows and cells, all checked before anything runs
presets.py   a paper's table as rows, with its printed numbers
run.py       `compare`: runs what is not done yet
outcome.py   `Comparison`: a finished one on disk, its tables and statistics
"""

from wardround.comparison.outcome import Comparison
from wardround.comparison.run import compare

__all__ = ["Comparison", "compare"]
