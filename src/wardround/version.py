"""The version of the package, as its metadata has it; it is written in pyproject.toml alone."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("wardround")
except PackageNotFoundError:  # sources on the path that nobody installed
    __version__ = "0+unknown"
