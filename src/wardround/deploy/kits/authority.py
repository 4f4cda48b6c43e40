"""The project's certificate authority: certificates, their end, and the signed manifest of a kit's files."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wardround.deploy.kits.kit import SIGNED, Kit, Role
from wardround.deploy.kits.private_key import as_value_errors, encode_key, load_key, make_key
from wardround.deploy.kits.project import Project
from wardround.errors import ConfigError
from wardround.files import write_json, write_private
from wardround.text import suggest

MANIFEST_SCHEMA = "wardround-manifest-2"
AUTHORITY_DAYS = 3650
BACKDATED = timedelta(hours=1)  # a hospital's clock may be a little behind
PURPOSES = {"hospital": ExtendedKeyUsageOID.CLIENT_AUTH, "organiser": ExtendedKeyUsageOID.SERVER_AUTH}
SIGNATURE = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


@dataclass
class Authority:
    """The project's own certificate authority.

    issued: serial numbers by name, the newest last; revoked: when, by serial number.
    """

    folder: Path
    project_id: str
    certificate: x509.Certificate
    key: rsa.RSAPrivateKey
    facts: dict[str, Any]
    issued: dict[str, list[str]] = field(default_factory=dict)
    revoked: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(
        cls, folder: Path, project: Project, bind: str | None, passphrase: bytes | None = None
    ) -> Authority:
        """The existing one, if it belongs to the same project and address; else a new one.

        passphrase: for the key of a new one.
        """
        facts = {
            "project": project.project,
            "host": project.organiser.host,
            "port": project.organiser.port,
            "bind": bind,
        }
        if not folder.exists():
            return cls.create(folder, facts, passphrase)
        authority = cls.load(folder)
        for name, value in facts.items():
            if authority.facts.get(name) != value:
                raise ConfigError(
                    f"{folder.parent} holds the kits of a project whose {name} is "
                    f"{authority.facts.get(name)!r}; project.yaml says {value!r}. Kits already sent would no "
                    "longer work: restore it, or provision into another folder and send every kit again."
                )
        return authority

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """The one in a folder."""
        if not folder.is_dir():
            raise ConfigError(
                f"{folder.parent} has no authority ({folder.name}). Give the folder where kits were made: "
                "--kits FOLDER"
            )
        try:
            known = json.loads((folder / "project.json").read_text(encoding="utf-8"))
            key = load_key(folder / "ca.key")
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
            facts = {name: known.get(name) for name in ("project", "host", "port", "bind")}
            serials = {name: [one] if isinstance(one, str) else one for name, one in known["issued"].items()}
            return cls(
                folder, str(known["project_id"]), certificate, key, facts, serials, known.get("revoked", {})
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{folder} is not a readable authority ({error}). Restore it from a copy, or provision into "
                "another folder: kits of a new authority do not work with kits of the old one."
            ) from None

    @classmethod
    def create(cls, folder: Path, facts: dict[str, Any], passphrase: bytes | None = None) -> Authority:
        folder.mkdir(mode=0o700)
        key = make_key(3072)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, facts["project"])])
        uses = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        certificate = (
            start_certificate(name, name, key.public_key(), key, timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(uses, critical=True)
            .sign(key, hashes.SHA256())
        )
        made = cls(folder, secrets.token_hex(16), certificate, key, facts)
        write_private(folder / "ca.key", encode_key(key, passphrase))
        write_private(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
        made.save()
        return made

    def save(self) -> None:
        plain = {"project_id": self.project_id, **self.facts, "issued": self.issued, "revoked": self.revoked}
        write_private(self.folder / "project.json", json.dumps(plain, indent=2).encode() + b"\n")

    def issue(
        self,
        name: str,
        organisation: str,
        *,
        role: Role,
        valid: timedelta,
        host: str | None = None,
        start: datetime | None = None,
    ) -> tuple[x509.Certificate, rsa.RSAPrivateKey]:
        """A key and its certificate."""
        key = make_key()
        certificate = self.certify(
            key.public_key(), name, organisation, role=role, valid=valid, host=host, start=start
        )
        return certificate, key

    def certify(
        self,
        public: rsa.RSAPublicKey,
        name: str,
        organisation: str,
        *,
        role: Role,
        valid: timedelta,
        host: str | None = None,
        start: datetime | None = None,
    ) -> x509.Certificate:
        """The certificate of a key: a hospital may connect and never serve, the organiser the reverse.

        host: where the organiser is reached. A hospital has no name but its common name.
        """
        parts = {
            NameOID.COMMON_NAME: name,
            NameOID.ORGANIZATION_NAME: organisation,
            NameOID.ORGANIZATIONAL_UNIT_NAME: role,
        }
        subject = x509.Name([x509.NameAttribute(kind, text) for kind, text in parts.items()])
        uses = x509.KeyUsage(True, False, True, False, False, False, False, False, False)
        certificate = (
            start_certificate(subject, self.certificate.subject, public, self.key, valid, start)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(uses, critical=True)
            .add_extension(x509.ExtendedKeyUsage([PURPOSES[role]]), critical=False)
        )
        if host is not None:
            names = x509.SubjectAlternativeName([as_general_name(host)])
            certificate = certificate.add_extension(names, critical=False)
        return certificate.sign(self.key, hashes.SHA256())

    def note(self, name: str, certificate: x509.Certificate) -> None:
        """Remember what was issued: only that can be revoked."""
        self.issued.setdefault(name, []).append(str(certificate.serial_number))
        self.save()

    def is_current(self, name: str) -> bool:
        """Whether it has issued something for this name that was not revoked."""
        return any(serial not in self.revoked for serial in self.issued.get(name, ()))

    def revoke(self, name: str) -> bytes:
        """End everything that was issued for a name; returns the new list of what was revoked."""
        if name not in self.issued:
            raise ConfigError(
                f"there is no kit of '{name}'.{suggest(name, sorted(self.issued))} There are kits of "
                f"{', '.join(sorted(self.issued))}."
            )
        now = datetime.now(UTC).replace(microsecond=0)
        for serial in self.issued[name]:
            self.revoked.setdefault(serial, now.isoformat())
        self.save()
        return self.list_revoked(now)

    def list_revoked(self, now: datetime) -> bytes:
        """A certificate revocation list (X.509), signed."""
        ids = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        listed = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now)
            .next_update(now + timedelta(days=AUTHORITY_DAYS))
            .add_extension(ids, critical=False)
            .add_extension(x509.CRLNumber(len(self.revoked)), critical=False)
        )
        for serial, moment in sorted(self.revoked.items()):
            entry = x509.RevokedCertificateBuilder().serial_number(int(serial))
            listed = listed.add_revoked_certificate(
                entry.revocation_date(datetime.fromisoformat(moment)).build()
            )
        return listed.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def sign(self, content: bytes) -> str:
        return base64.b64encode(self.key.sign(content, SIGNATURE, hashes.SHA256())).decode()


def start_certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: rsa.RSAPublicKey,
    signer: rsa.RSAPrivateKey,
    valid: timedelta,
    start: datetime | None = None,
) -> x509.CertificateBuilder:
    """The fields that every certificate has."""
    start = start or datetime.now(UTC) - BACKDATED
    ids = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(ids, critical=False)
    )


def as_general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def format_fingerprint(certificate: x509.Certificate) -> str:
    """Eight groups of an authority's SHA-256, short enough to compare over the telephone."""
    digest = certificate.fingerprint(hashes.SHA256()).hex()[:32]
    return " ".join(digest[start : start + 4] for start in range(0, 32, 4))


def load_authority(kit: Kit) -> x509.Certificate:
    """The certificate of the project's authority, as the kit has it."""
    with as_value_errors():
        return x509.load_pem_x509_certificate(kit.authority.read_bytes())


def read_issued(folder: Path) -> tuple[x509.Certificate, list[str]]:
    """The authority that made the kits of a folder, and all names it ever made one for."""
    known = json.loads((folder / ".authority" / "project.json").read_text(encoding="utf-8"))
    certificate = x509.load_pem_x509_certificate((folder / ".authority" / "ca.pem").read_bytes())
    return certificate, list(known["issued"])


def write_manifest(kit: Kit, authority: Authority) -> None:
    contents = {name: (kit.folder / name).read_bytes() for name in SIGNED}
    write_json(kit.folder / "manifest.json", make_manifest(kit.project_id, kit.name, contents, authority))


def make_manifest(
    project_id: str, name: str, contents: Mapping[str, bytes], authority: Authority
) -> dict[str, Any]:
    """Checksums of all that must not change, signed; the key is checked against its certificate instead."""
    files = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    signature = authority.sign(encode_manifest(project_id, name, files))
    return {"schema": MANIFEST_SCHEMA, "files": files, "signature": signature}


def encode_manifest(project_id: str, name: str, files: Mapping[str, str]) -> bytes:
    """What is signed: the checksums, and whose kit they are of."""
    plain = {"schema": MANIFEST_SCHEMA, "project_id": project_id, "name": name, "files": dict(files)}
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
