"""What a kit's key signs for secure sums.

`wardround join` has read the key and, if there is one, its passphrase; the process that trains, which reads
foreign messages, does neither and asks `join` through their pipe (deploy/worker.py, deploy/joining.py).
`join` signs only what begins with a tag of its own: no TLS handshake, no renewal of a certificate. It has no
PyTorch, so this module needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa

from wardround.deploy.kits.authority import SIGNATURE
from wardround.deploy.kits.kit import Kit
from wardround.deploy.kits.private_key import load_key

Sign = Callable[[bytes], bytes]
TAG = b"wardround-hospital-statement-1"
LOADED: dict[Path, tuple[bytes, rsa.RSAPrivateKey]] = {}  # a key's file as it was, and the key


def sign_statement(kit: Kit, data: bytes) -> bytes:
    """A signature with the kit's key."""
    return load_present_key(kit.own_key).sign(tag_statement(kit, data), SIGNATURE, hashes.SHA256())


def load_present_key(path: Path) -> rsa.RSAPrivateKey:
    """The key in a file, a renewed one at once; it is checked only when it is new, which takes 0.1 s."""
    content = path.read_bytes()
    if path not in LOADED or LOADED[path][0] != content:
        LOADED[path] = content, load_key(path)
    return LOADED[path][1]


def tag_statement(kit: Kit, data: bytes) -> bytes:
    """What is signed: nothing else that a kit's key signs begins like this."""
    return b"\n".join((TAG, kit.project_id.encode(), data))
