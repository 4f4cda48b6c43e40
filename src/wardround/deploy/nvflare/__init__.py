"""The adapter to NVIDIA FLARE: the only folder that imports it. It is an optional extra."""

from __future__ import annotations

import importlib.util

from wardround.errors import ConfigError


def require() -> None:
    """Raise with the install command where the engine is missing."""
    if importlib.util.find_spec("nvflare") is None:
        raise ConfigError("this needs NVIDIA FLARE: pip install 'wardround[nvflare]'")
