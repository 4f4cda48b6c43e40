"""Who a hospital is in a secure sum over FLARE: the certificate in its startup kit, and the key beside it.

FLARE gives every participant a certificate by the federation's root. An administrator's says its role, a
site's says "client" or nothing. A server's may say nothing too, so its name, which is in every startup kit,
is refused. A relay's cannot be told from a hospital's, and FLARE has no list of what was revoked.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

from wardround.deploy.kits.authority import SIGNATURE
from wardround.deploy.kits.private_key import as_value_errors, load_key
from wardround.deploy.kits.signing import check_signature, read_certificate, read_names, refuse
from wardround.errors import WardroundError
from wardround.privacy.secure_sum import Identity

CERTIFICATE, KEY, ROOT, SETTINGS = "client.crt", "client.key", "rootCA.pem", "fed_client.json"
SITE_ROLES: tuple[list[str], ...] = ([], ["client"])  # provisioned together, or for its own request
TAG = b"wardround-flare-statement-1"  # FLARE itself signs what begins with a participant's name
log = logging.getLogger(__name__)


def find_identity(startup: Path) -> Identity | None:
    """The hospital of a startup kit; None where there is none, as in FLARE's simulator."""
    if not (startup / CERTIFICATE).exists():
        return None
    try:
        with as_value_errors():
            return FlareIdentity(startup)
    except (OSError, ValueError, LookupError, TypeError, WardroundError) as error:
        log.warning("this hospital cannot sign in secure sums: %s cannot be used (%s)", startup, error)
        return None


class FlareIdentity:
    """A hospital by its certificate, and the others by theirs, all by the root of the same federation."""

    def __init__(self, startup: Path) -> None:
        self._root = x509.load_pem_x509_certificate((startup / ROOT).read_bytes())
        self._key = load_key(startup / KEY)
        self.certificate = (startup / CERTIFICATE).read_text(encoding="ascii")
        told = json.loads((startup / SETTINGS).read_text(encoding="utf-8"))
        self._servers = {str(server["identity"]) for server in told["servers"]}

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(self._tag(data), SIGNATURE, hashes.SHA256())

    def verify(self, name: str, certificate: str, signature: bytes, data: bytes) -> None:
        """Refuse a certificate that is not this hospital's or not valid, and what its key did not sign."""
        found = read_certificate(name, certificate, self._root)
        if name in self._servers or read_names(found, NameOID.UNSTRUCTURED_NAME) not in SITE_ROLES:
            raise refuse(name, "is not a hospital's")
        check_signature(name, found, signature, self._tag(data))

    def _tag(self, data: bytes) -> bytes:
        """What is signed: nothing else that a site's key signs begins like this."""
        return b"\n".join((TAG, self._root.fingerprint(hashes.SHA256()).hex().encode(), data))
