"""The kit and its certificates."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from wardround.deploy.kits.authority import (
    MANIFEST_SCHEMA,
    SIGNATURE,
    encode_manifest,
    format_fingerprint,
    load_authority,
)
from wardround.deploy.kits.kit import SIGNED, Kit
from wardround.deploy.kits.private_key import as_value_errors, load_key
from wardround.deploy.preflight import NEW_KIT, Check, CheckFailed, PreflightContext, warn

SOON = timedelta(days=14)
AGAIN = "Unpack the kit again, or ask the organiser for a new one."
LARGEST = 100_000  # bytes of a file that came with the kit
# What its owner and wardround write; nothing of it is signed, and nothing of it is code.
OWN = {
    "hospital": frozenset({"site.yaml", "state", "logs"}),
    "organiser": frozenset({"state", "logs", "runs", "survey"}),
}
# What operating systems and editors leave behind; wardround reads none of it.
HARMLESS = frozenset({".DS_Store", "Thumbs.db", "desktop.ini", "site.yaml~", ".site.yaml.swp"})


def check_kit(context: PreflightContext) -> str:
    """All files are there and as they were signed, and there is no other."""
    kit = context.kit
    if kit.next_key.exists() and not kit.own_certificate.exists():
        raise CheckFailed(
            f"the certificate of {kit.folder} has not come yet.",
            f"Send {kit.request.name} to the organiser; put the answer, {kit.answer.name}, into "
            f"{kit.folder.parent}.",
        )
    refuse_path_inside(kit)
    refuse_others(kit)
    files, authority = read_manifest(kit)
    for name in (*SIGNED, "keys/own.key"):
        file = kit.folder / name
        if not file.is_file():
            raise CheckFailed(f"{file} is missing.", AGAIN)
        if name in files and hashlib.sha256(file.read_bytes()).hexdigest() != files[name]:
            raise CheckFailed(f"{file} is not as it was signed.", AGAIN)
    return (
        f"{kit.role} '{kit.name}' of project '{kit.project}', {len(files)} files as signed; "
        f"authority {format_fingerprint(authority)}"
    )


def read_manifest(kit: Kit) -> tuple[dict[str, str], x509.Certificate]:
    """The checksums that the project's authority signed, and the authority."""
    try:
        manifest = json.loads((kit.folder / "manifest.json").read_bytes())
        if manifest["schema"] != MANIFEST_SCHEMA:
            raise ValueError(f"schema {manifest['schema']!r}")
        files, signature = dict(manifest["files"]), base64.b64decode(manifest["signature"])
        authority = load_authority(kit)
        public = authority.public_key()
        if not isinstance(public, rsa.RSAPublicKey):
            raise ValueError("the authority has a key of another kind")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UnsupportedAlgorithm) as error:
        raise CheckFailed(
            f"{kit.folder} is not complete: manifest.json or keys/authority.crt cannot be read "
            f"({shorten_error(error)}).",
            AGAIN,
        ) from None
    try:
        public.verify(signature, encode_manifest(kit.project_id, kit.name, files), SIGNATURE, hashes.SHA256())
    except InvalidSignature:
        raise CheckFailed(
            f"{kit.folder}/manifest.json is not signed by the project's authority.", AGAIN
        ) from None
    if sorted(files) != sorted(SIGNED):
        raise CheckFailed(f"{kit.folder}/manifest.json does not name the files of a kit.", AGAIN)
    return files, authority


def refuse_path_inside(kit: Kit) -> None:
    """Nothing is imported from a kit: no folder that Python looks in, nor the current one, is inside it."""
    inside = kit.folder.resolve()
    for place in (Path(folder).resolve() for folder in ("", *sys.path)):
        if place.is_relative_to(inside):
            raise CheckFailed(
                f"Python would look for modules in the kit ({place}).",
                f"Start wardround in another folder, for example with cd {shlex.quote(str(inside.parent))}; "
                "PYTHONPATH must not name the kit either.",
            )


def refuse_others(kit: Kit) -> None:
    """Name what the manifest does not: an added file, a folder, or a link in the place of a signed file."""
    expected = {*SIGNED, "manifest.json", "keys/own.key"}
    for folder in (kit.folder, kit.folder / "keys"):
        try:
            found = sorted(folder.iterdir())
        except OSError as error:
            raise CheckFailed(f"{folder} cannot be read ({error.strerror}).", AGAIN) from None
        for path in found:
            name = path.relative_to(kit.folder).as_posix()
            if name in OWN[kit.role]:
                continue
            if path.is_symlink():
                raise CheckFailed(f"{path} is a link, and a kit has none.", AGAIN)
            is_known = path.is_dir() if name == "keys" else path.is_file() and name in expected
            if not is_known and not (path.is_file() and path.name in HARMLESS):
                raise CheckFailed(
                    f"{path} is not part of the kit: it is not in the signed manifest.",
                    "Move it out of the kit. Your own files, such as federation.yaml, go elsewhere: name "
                    "their place in site.yaml or with --data.",
                )
            if path.is_file() and path.stat().st_size > LARGEST:
                raise CheckFailed(f"{path} is larger than any file of a kit.", AGAIN)


def check_certificates(context: PreflightContext) -> Check | str:
    """The certificate comes from the project's authority, fits its key and its owner, and is valid now."""
    kit, authority = context.kit, load_authority(context.kit)
    path, owner = kit.own_certificate, kit.name if kit.role == "hospital" else kit.server
    ends = [check_dates(kit.authority, authority, context.now)]
    try:
        with as_value_errors():
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        key = load_key(kit.own_key)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CheckFailed(f"{path} or its key cannot be read ({shorten_error(error)}).", NEW_KIT) from None
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise CheckFailed(
            f"{path} was not issued by this project's authority (authority.crt).", NEW_KIT
        ) from None
    if certificate.public_key() != key.public_key():
        raise CheckFailed(f"{kit.own_key} is not the key of {path.name}.", NEW_KIT)
    for kind, expected in ((NameOID.COMMON_NAME, owner), (NameOID.ORGANIZATIONAL_UNIT_NAME, kit.role)):
        names = [name.value for name in certificate.subject.get_attributes_for_oid(kind)]
        if names != [expected]:
            found = ", ".join(repr(name) for name in names) or "nobody"
            raise CheckFailed(f"{path} is the certificate of {found}, not of '{expected}'.", NEW_KIT)
    ends.append(check_dates(path, certificate, context.now))
    left = min(ends) - context.now
    if left < SOON:
        return warn(f"valid for {left.days} more days, until {min(ends):%Y-%m-%d}", NEW_KIT)
    return f"valid until {min(ends):%Y-%m-%d}"


def shorten_error(error: Exception) -> str:
    """Why a file cannot be read, without OpenSSL's advice for programmers."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error).partition(". See ")[0]


def refuse_broken(kit: Kit, now: datetime | None = None) -> str:
    """Raise where a kit is incomplete or its certificates are not valid, before anything is started.

    Returns a warning where they expire soon, else nothing.
    """
    context = PreflightContext(kit, now=now or datetime.now(UTC))
    check_kit(context)
    found = check_certificates(context)
    return "" if isinstance(found, str) else f"the certificate of '{kit.name}' is {found.found}. {found.todo}"


def check_dates(path: Path, certificate: x509.Certificate, now: datetime) -> datetime:
    """The expiry of a certificate that is valid now."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        raise CheckFailed(
            f"{path} is valid from {start:%Y-%m-%d %H:%M} UTC on, but this machine says it is "
            f"{now:%Y-%m-%d %H:%M} UTC.",
            "Set this machine's clock.",
        )
    if now > end:
        raise CheckFailed(
            f"{path} expired on {end:%Y-%m-%d} (this machine says it is {now:%Y-%m-%d}).", NEW_KIT
        )
    return end
