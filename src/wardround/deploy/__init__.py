"""Real hospitals: everything a federated run over a network needs.

Organiser: project, server, job_queue, run_process, conducting, remote. Hospital: joining, worker, site_file,
rules, site, ledger. Both: kits (keys, and who signs them), wire, agreement, limits; rpc is the channel
between them.
nvflare is an adapter for federations on NVIDIA FLARE, and the only folder that imports it.
"""

from __future__ import annotations

import importlib.util

from wardround.errors import ConfigError


def require() -> None:
    """Raise with the install command where a package of the optional extra is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("grpc", "cryptography")):
        raise ConfigError("this needs gRPC and cryptography: pip install 'wardround[hospitals]'")
