"""The version of the package, as its metadata has it; it is written in pyproject.toml alone."""

from importlib.metadata import version

__version__ = version("wardround")
