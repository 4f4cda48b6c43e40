"""What a kit's key signs for secure sums.

`wardround join` has read the key and, if there is one, its passphrase; the process that trains, which reads
foreign messages, does neither and asks `join` through their pipe (deploy/worker.py, deploy/joining.py).
`join` signs only what begins with a tag of its own: no TLS handshake, no renewal of a certificate. It has no
PyTorch, so this module needs none.
"""

from __future__ import annotations

from collections.abc import Callable

from cryptography.hazmat.primitives import hashes

from wardround.deploy.kits.authority import SIGNATURE
from wardround.deploy.kits.kit import Kit
from wardround.deploy.kits.private_key import load_key

Sign = Callable[[bytes], bytes]
TAG = b"wardround-hospital-statement-1"


def sign_statement(kit: Kit, data: bytes) -> bytes:
    """A signature with the kit's key; read every time, so that a renewed one is taken at once."""
    return load_key(kit.own_key).sign(tag_statement(kit, data), SIGNATURE, hashes.SHA256())


def tag_statement(kit: Kit, data: bytes) -> bytes:
    """What is signed: nothing else that a kit's key signs begins like this."""
    return b"\n".join((TAG, kit.project_id.encode(), data))
