"""Enrolment: a hospital makes its key itself, and the project's authority signs it. The key never travels.

    organiser   invite    north.invitation.json    which project, where its server is, whom to trust
    hospital    accept    north.request.json       a signing request (PKCS #10); its key stays in the kit
    organiser   sign      north.certificate.json   the certificate, and the signed manifest of the kit
    hospital    install   ... into the kit

None of the three files is secret; comparing the authority's fingerprint by telephone shows that they were not
exchanged on the way. A renewal is the same without the invitation, and its request is signed with the key it
replaces, so that nobody else can ask for it.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from wardround.deploy import limits
from wardround.deploy.kits.authority import (
    BACKDATED,
    SIGNATURE,
    Authority,
    format_fingerprint,
    load_authority,
    make_manifest,
)
from wardround.deploy.kits.kit import ORGANISER, Kit, check_private, make_private, read_kit
from wardround.deploy.kits.private_key import as_value_errors, encode_key, load_key, make_key
from wardround.deploy.kits.project import NAME, Project
from wardround.deploy.kits.readme import render_readme
from wardround.deploy.kits.revocation import LIST
from wardround.deploy.strict_json import parse_json
from wardround.errors import ConfigError
from wardround.files import write_bytes, write_json, write_private, write_text

INVITATION, REQUEST, CERTIFICATE = "wardround-invitation-1", "wardround-request-1", "wardround-certificate-1"
INVITED = ("README.txt", "keys/authority.crt", "kit.json")  # files of a kit that its invitation holds


# The organiser


def invite(authority: Authority, kit: Kit, project: Project) -> Path:
    """Write the invitation of a hospital, unless there is one."""
    path = authority.folder.parent / f"{kit.name}.invitation.json"
    if not path.exists():
        files = note_terms(authority, kit, project)
        write_json(path, {"schema": INVITATION, "name": kit.name, "files": files})
    return path


def note_terms(authority: Authority, kit: Kit, project: Project) -> dict[str, str]:
    """Have the authority remember what it will sign for a hospital; returns the files of its kit."""
    files = {
        "README.txt": render_readme(kit),
        "keys/authority.crt": encode_certificate(authority.certificate),
        "kit.json": json.dumps(kit.as_dict(), indent=2) + "\n",
    }
    terms = {"organisation": project.find_organisation(kit.name), "valid_days": project.valid_days}
    content = json.dumps({"files": files, **terms}, indent=2).encode()
    write_private(authority.folder / "invitations" / f"{kit.name}.json", content)
    return files


def sign(authority: Authority, path: Path, *, again: bool = False) -> tuple[Path, str]:
    """Sign a request; returns the file for the hospital, written beside the request, and its name.

    again: even if the hospital has a certificate that was not revoked, and did not sign with its key.
    """
    values = read_letter(path, REQUEST, "csr", "project_id")
    name, request = values["name"], read_request(path, values)
    try:
        invitation = json.loads((authority.folder / "invitations" / f"{name}.json").read_bytes())
        files, days = dict(invitation["files"]), int(invitation["valid_days"])
        organisation = str(invitation["organisation"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: '{name}' was not invited to this project. Invite it first.") from None
    if values["project_id"] != authority.project_id:
        raise ConfigError(f"{path} is a request to another project. Ask '{name}' to enrol in this one.")
    if authority.is_current(name) and not again and not is_renewal(authority, values):
        raise ConfigError(
            f"'{name}' has a certificate already, and {path} is not signed with its key. Ask the hospital by "
            f"telephone whether it is theirs; then revoke the old one first (wardround revoke {name}), or "
            "sign this one too: --again."
        )
    valid = timedelta(days=days) + BACKDATED
    certificate = authority.certify(request, name, organisation, role="hospital", valid=valid)
    contents = {**files, "keys/own.crt": encode_certificate(certificate)}
    plain = {file: contents[file].encode() for file in sorted(contents)}
    manifest = make_manifest(authority.project_id, name, plain, authority)
    authority.note(name, certificate)
    answer = path.with_name(f"{name}.certificate.json")
    write_json(
        answer,
        {"schema": CERTIFICATE, "name": name, "files": {"keys/own.crt": contents["keys/own.crt"]}}
        | {"manifest": manifest},
    )
    return answer, name


def revoke(kits: Path, name: str) -> Path | None:
    """End all certificates of a hospital; returns the list in the organiser's kit, None if it is not here."""
    if name == ORGANISER:
        raise ConfigError(
            "the organiser's kit cannot be revoked: hospitals know the authority alone. Make a new project "
            "in another folder, and invite every hospital again."
        )
    authority = Authority.load(kits / ".authority")
    content = authority.revoke(name)
    write_private(authority.folder / LIST, content)
    state = kits / ORGANISER / "state"
    if not state.is_dir():
        return None
    write_private(state / LIST, content)
    return state / LIST


def read_request(path: Path, values: Mapping[str, Any]) -> rsa.RSAPublicKey:
    """The key of a signing request whose sender has its private half."""
    try:
        with as_value_errors():
            request = x509.load_pem_x509_csr(str(values["csr"]).encode())
            public = request.public_key()
            names = [part.value for part in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
            is_proved = request.is_signature_valid
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} holds no readable signing request ({error}).") from None
    shortest, longest = limits.KEY_BITS
    if not isinstance(public, rsa.RSAPublicKey) or not shortest <= public.key_size <= longest:
        raise ConfigError(f"{path}: its key is not RSA of {shortest} to {longest} bits.")
    if not is_proved or names != [values["name"]]:
        raise ConfigError(f"{path}: the signing request is not one that '{values['name']}' signed.")
    return public


def is_renewal(authority: Authority, values: Mapping[str, Any]) -> bool:
    """Whether the key of a certificate that is valid now asks for its successor."""
    try:
        with as_value_errors():
            certificate = x509.load_pem_x509_certificate(str(values["certificate"]).encode())
            certificate.verify_directly_issued_by(authority.certificate)
            public = certificate.public_key()
        assert isinstance(public, rsa.RSAPublicKey)
        signature = base64.b64decode(str(values["signature"]))
        public.verify(signature, str(values["csr"]).encode(), SIGNATURE, hashes.SHA256())
    except (KeyError, ValueError, TypeError, AssertionError, InvalidSignature):
        return False
    serial, now = str(certificate.serial_number), datetime.now(UTC)
    is_own = serial in authority.issued.get(values["name"], ()) and serial not in authority.revoked
    return is_own and certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


# The hospital


def accept(
    invitation: Path,
    render_rules: Callable[[str], str],
    folder: Path | None = None,
    passphrase: bytes | None = None,
) -> Kit:
    """A kit with a new key that waits for its certificate.

    render_rules: its first site.yaml, by the hospital's name; folder: that name here, unless given.
    """
    values = read_letter(invitation, INVITATION, "files")
    files = values["files"]
    if (
        not isinstance(files, dict)
        or sorted(files) != sorted(INVITED)
        or not all(map(is_text, files.values()))
    ):
        raise ConfigError(f"{invitation} does not hold the files of a kit. Ask the organiser for it again.")
    target = (folder or Path(values["name"])).absolute()
    if target.exists():
        raise ConfigError(
            f"{target} exists already, and nothing is overwritten. Continue with it: wardround hospital "
            f"setup {target}; or give another folder."
        )
    try:
        for file in INVITED:
            write_text(target / file, files[file])
        kit = read_kit(target)
        load_authority(kit)
        if kit.role != "hospital" or kit.name != values["name"]:
            raise ValueError("it is not a hospital's")
        for part in (kit.state, kit.logs):
            part.mkdir()
        write_text(kit.site_file, render_rules(kit.name))
        request_certificate(kit, passphrase)
        make_private(kit.folder)
        check_private(kit)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, ValueError):
            raise ConfigError(f"{invitation} cannot be used ({error}). Ask for it again.") from None
        raise
    return kit


def request_certificate(kit: Kit, passphrase: bytes | None = None) -> Path:
    """Make a key, and write the request for its certificate beside the kit; an earlier one is forgotten."""
    key = make_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, kit.name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    csr = request.public_bytes(serialization.Encoding.PEM)
    values: dict[str, Any] = {"schema": REQUEST, "name": kit.name, "project_id": kit.project_id}
    values |= {"csr": csr.decode()}
    if kit.own_certificate.exists():
        signature = load_key(kit.own_key).sign(csr, SIGNATURE, hashes.SHA256())
        values |= {"certificate": kit.own_certificate.read_text(encoding="ascii")}
        values |= {"signature": base64.b64encode(signature).decode()}
    write_private(kit.next_key, encode_key(key, passphrase))
    kit.answer.unlink(missing_ok=True)
    write_json(kit.request, values)
    return kit.request


def install(kit: Kit, answer: Path | None = None) -> None:
    """Put a certificate that came into its kit; what fails half-way can be done again."""
    path = answer or kit.answer
    values = read_letter(path, CERTIFICATE, "files", "manifest")
    if values["name"] != kit.name:
        raise ConfigError(f"{path} is the certificate of '{values['name']}', and the kit is of '{kit.name}'.")
    if not kit.next_key.exists():
        raise ConfigError(
            f"{kit.folder} waits for no certificate. Renew it with: wardround enrol KIT --renew"
        )
    key = load_key(kit.next_key)
    try:
        text = str(values["files"]["keys/own.crt"])
        with as_value_errors():
            certificate = x509.load_pem_x509_certificate(text.encode())
            certificate.verify_directly_issued_by(load_authority(kit))
    except (ValueError, KeyError, TypeError, InvalidSignature):
        raise ConfigError(
            f"{path} was not issued by the authority of this kit. Compare fingerprints with the organiser."
        ) from None
    if certificate.public_key() != key.public_key():
        raise ConfigError(
            f"{path} is the certificate of another key: of an earlier request, or of another kit. Send the "
            f"newest request: {kit.request}"
        )
    write_private(kit.own_key, (kit.next_key).read_bytes())
    write_bytes(kit.own_certificate, text.encode())
    write_json(kit.folder / "manifest.json", values["manifest"])
    make_private(kit.folder / "keys")
    (kit.folder / "manifest.json").chmod(0o600)
    (kit.next_key).unlink()


def describe_authority(kit: Kit) -> str:
    """The fingerprint to compare by telephone."""
    return format_fingerprint(load_authority(kit))


# Files that come from the other side


def read_letter(path: Path, schema: str, *keys: str) -> dict[str, Any]:
    """The fields of one of the three files; its size and the name in it are checked."""
    try:
        with path.open("rb") as file:
            content = file.read(limits.LETTER_BYTES + 1)
        if len(content) > limits.LETTER_BYTES:
            raise ValueError(f"has more than {limits.LETTER_BYTES:,} bytes")
        values = parse_json(content.decode())
        if not isinstance(values, dict) or values.get("schema") != schema:
            raise ValueError(f"is not a {schema.split('-')[1]}")
        name = values.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name) or not all(key in values for key in keys):
            raise ValueError(f"is not a whole {schema.split('-')[1]}")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        reason = "is not text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ConfigError(f"{path} cannot be used: it {reason}. Ask for the file again.") from None
    return values


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isascii()


def encode_certificate(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
