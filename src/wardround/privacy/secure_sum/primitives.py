"""What the protocol takes from `cryptography`; the only module of the room that knows the library.

Keys are raw bytes. Agreement is X25519, derivation HKDF with SHA-256, encryption ChaCha20-Poly1305, the
stream of masks AES-256 in counter mode, a simulation's signatures Ed25519.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    IS_INSTALLED = True
except ImportError:  # told by `require_library`
    IS_INSTALLED = False

from wardround.errors import ConfigError

KEY_BYTES = 32  # of every key, public or private, of seeds and of hashes
NONCE_BYTES, TAG_BYTES = 12, 16  # that `seal` adds


def require_library() -> None:
    if not IS_INSTALLED:
        raise ConfigError(
            "a secure sum needs the package cryptography, which is not installed. "
            "Install it with: pip install 'wardround[privacy]'"
        )


def encode_fields(*fields: bytes | str | int) -> bytes:
    """One byte string for a list of values, different for every list: each field has its length before it."""
    parts = []
    for field in fields:
        if isinstance(field, int):
            field = str(field)
        content = field.encode() if isinstance(field, str) else field
        parts.append(len(content).to_bytes(8, "big") + content)
    return b"".join(parts)


def digest(*fields: bytes | str | int) -> bytes:
    """SHA-256 of the fields."""
    return hashlib.sha256(encode_fields(*fields)).digest()


def derive_key(secret: bytes, *fields: bytes | str | int) -> bytes:
    """A key for what the fields say; no salt, for the secrets are uniform or from X25519."""
    return HKDF(SHA256(), KEY_BYTES, None, encode_fields(*fields)).derive(secret)


def draw_secret() -> bytes:
    return os.urandom(KEY_BYTES)


def make_key_pair() -> tuple[bytes, bytes]:
    """A fresh X25519 key: private, public."""
    private = X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def find_public_key(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """The secret that two keys share; a ValueError where the public one is a point of small order."""
    own = X25519PrivateKey.from_private_bytes(private)
    return own.exchange(X25519PublicKey.from_public_bytes(public))


def seal(key: bytes, content: bytes, bound: bytes) -> bytes:
    """Encrypted, with its nonce before it; bound: must be the same when it is opened."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, bound)


def open_sealed(key: bytes, sealed: bytes, bound: bytes) -> bytes:
    """The content; a ValueError where anything was changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], bound)
    except InvalidTag:
        raise ValueError("does not decrypt") from None


def open_key_stream(key: bytes) -> Callable[[bytes, bytearray], int]:
    """A function that writes the next bytes of the stream: as many as the zeros it is given.

    The counter begins at zero, so a key is for one vector alone.
    """
    return Cipher(AES(key), CTR(bytes(16))).encryptor().update_into


def make_signing_key() -> tuple[bytes, bytes]:
    """A fresh Ed25519 key: private, public."""
    private = Ed25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def sign(private: bytes, data: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).sign(data)


def is_signed(public: bytes, signature: bytes, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True
