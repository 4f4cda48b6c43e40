"""Comparisons: a grid of ordinary runs, their statistics and tables.

run.py (`compare`) runs what sweep.py, presets.py and grid.py plan; outcome.py (`Comparison`) opens it on
disk. scores.py, statistics.py and tables.py compute; published.py sets a paper's numbers beside ours, and
departures.py says what is not as printed; same_objective.py gives all rows one objective, headline.py has the
result in words; runs.py reads single run folders, and groups.py puts several together for the report.
"""

from wardround.comparison.outcome import Comparison
from wardround.comparison.run import compare

__all__ = ["Comparison", "compare"]
