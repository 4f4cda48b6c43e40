"""The papers' tables as presets.

presets.py reads configs/papers: what each table runs, and the published numbers; cards.py shows them.
"""

from wardround.papers.presets import PaperPreset, expand, list_names, load

__all__ = ["PaperPreset", "expand", "list_names", "load"]
