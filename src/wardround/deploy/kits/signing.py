"""Who a hospital is in a secure sum: its kit's certificate, and signatures with its kit's key."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from wardround.deploy import limits
from wardround.deploy.kits.authority import PURPOSES, SIGNATURE, load_authority
from wardround.deploy.kits.kit import Kit
from wardround.deploy.kits.revocation import Revocations
from wardround.deploy.kits.statements import Sign, sign_statement, tag_statement
from wardround.privacy.secure_sum import Identity, SumRefusal


def site_identity(kit: Kit, sign: Sign | None = None) -> Identity:
    """The hospital of a kit in secure sums; with the organiser's kit, one that verifies the hospitals.

    sign: has a statement signed where the key is; without it the key is read here.
    """
    return KitIdentity(kit, sign or (lambda data: sign_statement(kit, data)))


class KitIdentity:
    """A hospital by its certificate, and the others by theirs, all of the project's authority."""

    def __init__(self, kit: Kit, sign: Sign) -> None:
        self._kit = kit
        self._authority = load_authority(kit)
        self._revoked = Revocations(kit)  # the organiser has the list; a hospital if it was given one
        self.sign = sign

    @property
    def certificate(self) -> str:
        return self._kit.own_certificate.read_text(encoding="ascii")

    def verify(self, name: str, certificate: str, signature: bytes, data: bytes) -> None:
        """Refuse a certificate that is not this hospital's or not valid, and what its key did not sign."""
        found = read_certificate(name, certificate, self._authority)
        units = read_names(found, NameOID.ORGANIZATIONAL_UNIT_NAME)
        if units != ["hospital"] or PURPOSES["hospital"] not in read_purposes(name, found):
            raise refuse(name, "is not a hospital's")
        self._revoked.refresh()
        if found.serial_number in self._revoked:
            raise refuse(name, "was revoked")
        check_signature(name, found, signature, tag_statement(self._kit, data))


def read_certificate(name: str, text: str, authority: x509.Certificate) -> x509.Certificate:
    """The certificate of this name, if the authority itself issued it and it is valid now."""
    try:
        found = x509.load_pem_x509_certificate(text.encode())
        found.public_key()
        found.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise refuse(name, "is not of the project's authority") from None
    if read_names(found, NameOID.COMMON_NAME) != [name]:
        raise refuse(name, "is not of that name")
    now = datetime.now(UTC)
    if not found.not_valid_before_utc <= now <= found.not_valid_after_utc:
        ends = f"{found.not_valid_before_utc:%Y-%m-%d} to {found.not_valid_after_utc:%Y-%m-%d}"
        raise refuse(name, f"is valid from {ends}, and this machine says it is {now:%Y-%m-%d}")
    return found


def read_purposes(name: str, found: x509.Certificate) -> x509.ExtendedKeyUsage:
    try:
        return found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (ValueError, x509.ExtensionNotFound):
        raise refuse(name, "is not of the project's authority") from None


def check_signature(name: str, found: x509.Certificate, signature: bytes, statement: bytes) -> None:
    """Refuse what the certificate's key did not sign, and a key that is too weak or too long."""
    public, (shortest, longest) = found.public_key(), limits.KEY_BITS
    if not isinstance(public, rsa.RSAPublicKey) or not shortest <= public.key_size <= longest:
        raise refuse(name, f"has a key that is not RSA of {shortest} to {longest} bits")
    try:
        public.verify(signature, statement, SIGNATURE, hashes.SHA256())
    except InvalidSignature:
        raise SumRefusal(f"the signature of '{name}' is not valid.", name) from None


def read_names(certificate: x509.Certificate, kind: x509.ObjectIdentifier) -> list[str]:
    return [str(part.value) for part in certificate.subject.get_attributes_for_oid(kind)]


def refuse(name: str, why: str) -> SumRefusal:
    return SumRefusal(f"the certificate of '{name}' {why}.", name)
