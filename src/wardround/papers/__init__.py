"""The papers' tables as presets.

presets.py reads configs/papers: what each table runs, and the published numbers; cards.py shows them. data.py
makes its federations from folders, origin.py keeps two data sets out of one output folder, synthetic.py
stands in for the data sets, scaling.py makes it all smaller.
"""

from wardround.papers.presets import PaperPreset, expand, list_names, load

__all__ = ["PaperPreset", "expand", "list_names", "load"]
