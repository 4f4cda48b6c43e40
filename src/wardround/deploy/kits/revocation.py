"""The list of revoked certificates in the organiser's kit, which the server reads again when it changes.

`wardround revoke` writes it: a certificate revocation list (X.509), signed by the project's authority. One
that is damaged, of another authority, or older than the one before is not taken.
"""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa

from wardround.deploy import limits
from wardround.deploy.kits.kit import Kit
from wardround.deploy.kits.private_key import as_value_errors
from wardround.errors import ConfigError

LIST = "revoked.crl"  # in state/ of the organiser's kit, and in the authority's folder


class Revocations:
    """What was revoked, as the kit's list says; number: how many certificates."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._seen: tuple[int, int] | None = None  # time and size of the file that was read last
        self._serials: frozenset[int] = frozenset()
        self.number = 0

    @property
    def path(self) -> Path:
        return self._kit.state / LIST

    def refresh(self) -> bool:
        """Read the list if it is another than last time; True if it is longer now."""
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            return False
        seen = (facts.st_mtime_ns, facts.st_size)
        if seen == self._seen:
            return False
        self._seen = seen
        number, serials = read_list(self.path, self._kit.authority)
        if number < self.number:
            raise ConfigError(f"{self.path} is older than the list before it, and was not taken.")
        is_longer = number > self.number
        self.number, self._serials = number, serials
        return is_longer

    def __contains__(self, serial: int) -> bool:
        return serial in self._serials


def read_list(path: Path, authority: Path) -> tuple[int, frozenset[int]]:
    """The number of a list, and the serial numbers in it."""
    again = "Put it there again from the authority's folder."
    try:
        with path.open("rb") as file:
            content = file.read(limits.REVOCATION_BYTES + 1)
        if len(content) > limits.REVOCATION_BYTES:
            raise ValueError("it is too large")
        with as_value_errors():
            listed = x509.load_pem_x509_crl(content)
            public = x509.load_pem_x509_certificate(authority.read_bytes()).public_key()
            if not isinstance(public, rsa.RSAPublicKey) or not listed.is_signature_valid(public):
                raise ConfigError(f"{path} is not signed by the project's authority. {again}")
            number = listed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            return number, frozenset(entry.serial_number for entry in listed)
    except (OSError, ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{path} cannot be read ({error}). {again}") from None
