"""Real hospitals: everything a federated run over a network needs.

Organiser: project, conducting, remote, live_file. Hospital: kits, site_file, rules, site, ledger.
Both: wire, agreement. deploy/nvflare is an adapter and the only folder that imports NVIDIA FLARE.
"""

from __future__ import annotations

import importlib.util

from wardround.errors import ConfigError


def require() -> None:
    """Raise with the install command where a package of the optional extra is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("grpc", "cryptography", "psutil")):
        raise ConfigError("this needs gRPC and cryptography: pip install 'wardround[hospitals]'")
