"""Who signs: a member's key outlives its sums, and others know whose it is."""

from __future__ import annotations

import base64
import binascii
from typing import Protocol

from wardround.privacy.secure_sum.primitives import is_signed, make_signing_key, require_library, sign
from wardround.privacy.secure_sum.refusals import SumRefusal


class Identity(Protocol):
    """How a member signs, and how it knows the others."""

    @property
    def certificate(self) -> str:
        """What others need to verify, as text."""

    def sign(self, data: bytes) -> bytes:
        """A signature that `verify` of any member takes under this certificate."""

    def verify(self, name: str, certificate: str, signature: bytes, data: bytes) -> None:
        """Refuse (`SumRefusal`) a certificate of somebody else, and a signature that is not by its key."""


class LocalIdentity:
    """A fresh Ed25519 key that vouches for itself, for clients of one process.

    It protects nothing against a server that lies, as anyone can make one for any name: in one process the
    server is the same program as the clients.
    """

    def __init__(self) -> None:
        require_library()
        self._private, public = make_signing_key()
        self.certificate = base64.b64encode(public).decode()

    def sign(self, data: bytes) -> bytes:
        return sign(self._private, data)

    def verify(self, name: str, certificate: str, signature: bytes, data: bytes) -> None:
        try:
            public = base64.b64decode(certificate, validate=True)
        except (binascii.Error, ValueError):
            public = b""
        if not is_signed(public, signature, data):
            raise SumRefusal(f"the signature of '{name}' is not valid.", name)
