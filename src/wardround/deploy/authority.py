"""The project's certificate authority: keys, certificates, and the signed manifest of a kit's files."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wardround.deploy.kits import SIGNED, Kit, Role
from wardround.deploy.project import Project
from wardround.errors import ConfigError
from wardround.files import write_bytes, write_json

MANIFEST_SCHEMA = "wardround-manifest-2"
AUTHORITY_DAYS = 3650
BACKDATED = timedelta(hours=1)  # a hospital's clock may be a little behind
PURPOSES = {"hospital": ExtendedKeyUsageOID.CLIENT_AUTH, "organiser": ExtendedKeyUsageOID.SERVER_AUTH}
SIGNATURE = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


@dataclass
class Authority:
    """The project's own certificate authority and what it has issued: name -> serial number."""

    folder: Path
    project_id: str
    certificate: x509.Certificate
    key: rsa.RSAPrivateKey
    facts: dict[str, Any]
    issued: dict[str, str]

    @classmethod
    def open(cls, folder: Path, project: Project, bind: str | None) -> Authority:
        """The existing one, if it belongs to the same project and address; else a new one."""
        facts = {
            "project": project.project,
            "host": project.organiser.host,
            "port": project.organiser.port,
            "bind": bind,
        }
        if not folder.exists():
            return cls.create(folder, facts)
        try:
            known = json.loads((folder / "project.json").read_text(encoding="utf-8"))
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
            issued, project_id = dict(known["issued"]), str(known["project_id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{folder} is not a readable authority ({error}). Restore it from a copy, or provision into "
                "another folder: kits of a new authority do not work with kits of the old one."
            ) from None
        assert isinstance(key, rsa.RSAPrivateKey)
        for name, value in facts.items():
            if known.get(name) != value:
                raise ConfigError(
                    f"{folder.parent} holds the kits of a project whose {name} is {known.get(name)!r}; "
                    f"project.yaml says {value!r}. Kits already sent would no longer work: restore it, "
                    "or provision into another folder and send every kit again."
                )
        return cls(folder, project_id, certificate, key, facts, issued)

    @classmethod
    def create(cls, folder: Path, facts: dict[str, Any]) -> Authority:
        folder.mkdir(mode=0o700)
        key = rsa.generate_private_key(65537, 3072)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, facts["project"])])
        uses = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        certificate = (
            start_certificate(name, name, key.public_key(), key, timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(uses, critical=True)
            .sign(key, hashes.SHA256())
        )
        made = cls(folder, secrets.token_hex(16), certificate, key, facts, {})
        write_private(folder / "ca.key", as_pem(key))
        write_private(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
        made.save()
        return made

    def save(self) -> None:
        plain = {"project_id": self.project_id, **self.facts, "issued": self.issued}
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
        """A key and its certificate: a hospital may connect and never serve, the organiser the reverse.

        host: where the organiser is reached. A hospital has no name but its common name.
        """
        key = rsa.generate_private_key(65537, 2048)
        parts = {
            NameOID.COMMON_NAME: name,
            NameOID.ORGANIZATION_NAME: organisation,
            NameOID.ORGANIZATIONAL_UNIT_NAME: role,
        }
        subject = x509.Name([x509.NameAttribute(kind, text) for kind, text in parts.items()])
        uses = x509.KeyUsage(True, False, True, False, False, False, False, False, False)
        certificate = (
            start_certificate(subject, self.certificate.subject, key.public_key(), self.key, valid, start)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(uses, critical=True)
            .add_extension(x509.ExtendedKeyUsage([PURPOSES[role]]), critical=False)
        )
        if host is not None:
            names = x509.SubjectAlternativeName([as_general_name(host)])
            certificate = certificate.add_extension(names, critical=False)
        return certificate.sign(self.key, hashes.SHA256()), key

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


def as_pem(key: rsa.RSAPrivateKey) -> bytes:
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def format_fingerprint(certificate: x509.Certificate) -> str:
    """Eight groups of an authority's SHA-256, short enough to compare over the telephone."""
    digest = certificate.fingerprint(hashes.SHA256()).hex()[:32]
    return " ".join(digest[start : start + 4] for start in range(0, 32, 4))


def load_authority(kit: Kit) -> x509.Certificate:
    """The certificate of the project's authority, as the kit has it."""
    return x509.load_pem_x509_certificate(kit.authority.read_bytes())


def read_issued(folder: Path) -> tuple[x509.Certificate, list[str]]:
    """The authority that made the kits of a folder, and all names it ever made one for."""
    known = json.loads((folder / ".authority" / "project.json").read_text(encoding="utf-8"))
    certificate = x509.load_pem_x509_certificate((folder / ".authority" / "ca.pem").read_bytes())
    return certificate, list(known["issued"])


def write_private(path: Path, content: bytes) -> None:
    """A file for its owner alone, never readable by others even for a moment."""
    old = os.umask(0o077)
    try:
        write_bytes(path, content)
    finally:
        os.umask(old)


def write_manifest(kit: Kit, authority: Authority) -> None:
    """Checksums of all that must not change, signed; the key is checked against its certificate instead."""
    files = {name: hashlib.sha256((kit.folder / name).read_bytes()).hexdigest() for name in SIGNED}
    signature = authority.sign(encode_manifest(kit.project_id, kit.name, files))
    manifest = {"schema": MANIFEST_SCHEMA, "files": files, "signature": signature}
    write_json(kit.folder / "manifest.json", manifest)


def encode_manifest(project_id: str, name: str, files: Mapping[str, str]) -> bytes:
    """What is signed: the checksums, and whose kit they are of."""
    plain = {"schema": MANIFEST_SCHEMA, "project_id": project_id, "name": name, "files": dict(files)}
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
