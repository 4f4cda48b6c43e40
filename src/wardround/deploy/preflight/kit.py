"""The kit and its certificates."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from wardround.deploy.authority import (
    ADMIN,
    MANIFEST_SCHEMA,
    SIGNATURE,
    encode_manifest,
    format_fingerprint,
    load_authority,
)
from wardround.deploy.kits import Kit
from wardround.deploy.nvflare.job import REJOIN
from wardround.deploy.preflight import NEW_KIT, Check, CheckFailed, PreflightContext, warn
from wardround.errors import ConfigError

SOON = timedelta(days=14)


def check_kit(context: PreflightContext) -> Check | str:
    """All files are there and as they were signed; a changed file in local/ is the owner's responsibility."""
    kit = context.kit
    again = "Unpack the kit again, or ask the organiser for a new one."
    try:
        manifest = json.loads((kit.folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["schema"] != MANIFEST_SCHEMA:
            raise ValueError(f"schema {manifest['schema']!r}")
        files, signature = dict(manifest["files"]), base64.b64decode(manifest["signature"])
        authority = load_authority(kit)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckFailed(
            f"{kit.folder} is not complete: manifest.json or rootCA.pem cannot be read "
            f"({shorten_error(error)}).",
            again,
        ) from None
    public = authority.public_key()
    assert isinstance(public, rsa.RSAPublicKey)
    try:
        public.verify(signature, encode_manifest(kit.project_id, kit.name, files), SIGNATURE, hashes.SHA256())
    except InvalidSignature:
        raise CheckFailed(
            f"{kit.folder}/manifest.json is not signed by the project's authority.", again
        ) from None
    changed = []
    for name, digest in files.items():
        file = kit.folder / name
        if not file.is_file():
            raise CheckFailed(f"{file} is missing.", again)
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            changed.append(name)
    grave = [name for name in changed if "/local/" not in name and name != "README.txt"]
    if grave:
        raise CheckFailed(f"{kit.folder / grave[0]} is not as it was signed.", again)
    keys = {key.relative_to(kit.folder).as_posix() for key in kit.keys}
    lost = {name.removesuffix(".crt") + ".key" for name in files if name.endswith(".crt")} - keys
    if lost:
        raise CheckFailed(f"{kit.folder / min(lost)} is missing.", again)
    refuse_older(kit)
    if changed:
        names = ", ".join(changed)
        return warn(f"changed since the kit was made: {names}", "Check that this change is yours.")
    return (
        f"{kit.role} '{kit.name}' of project '{kit.project}', {len(files)} files as signed; "
        f"authority {format_fingerprint(authority)}"
    )


def refuse_older(kit: Kit) -> None:
    """Refuse a kit with the path of a class that has moved since: the engine would end in a traceback."""
    try:
        values = json.loads((kit.flare / "local" / "resources.json").read_text(encoding="utf-8"))
        paths = [str(component["path"]) for component in values["components"]]
    except (OSError, ValueError, KeyError, TypeError):
        return  # changed by its owner; the check of the files has said so
    for path in paths:
        if path.startswith("wardround.") and path != REJOIN:
            raise CheckFailed(
                f"{kit.folder} was made by an older version of wardround: it names {path}, which this "
                "version does not have.",
                "Move it away and run wardround provision again: wardround provision PROJECT --renew "
                f"{kit.name}",
            )


def check_certificates(context: PreflightContext) -> Check | str:
    """Each certificate comes from the project's authority, fits its key and its owner, and is valid now."""
    kit, authority = context.kit, load_authority(context.kit)
    if kit.role == "hospital":
        pairs = [(kit.startup / "client.crt", kit.name)]
    else:
        pairs = [(kit.startup / "server.crt", kit.server), (kit.admin / "startup" / "client.crt", ADMIN)]
    ends = [check_dates(kit.startup / "rootCA.pem", authority, context.now)]
    for path, owner in pairs:
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            key = serialization.load_pem_private_key(path.with_suffix(".key").read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise CheckFailed(
                f"{path} or its key cannot be read ({shorten_error(error)}).", NEW_KIT
            ) from None
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            raise CheckFailed(
                f"{path} was not issued by this project's authority (rootCA.pem).", NEW_KIT
            ) from None
        if certificate.public_key() != key.public_key():
            raise CheckFailed(f"{path.with_suffix('.key')} is not the key of {path.name}.", NEW_KIT)
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if [name.value for name in names] != [owner]:
            raise CheckFailed(f"{path} is the certificate of {names[0].value!r}, not of '{owner}'.", NEW_KIT)
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


def refuse_broken(kit: Kit, now: datetime | None = None) -> None:
    """Raise where a kit is incomplete or its certificates are not valid, before anything is started."""
    context = PreflightContext(kit, now=now or datetime.now(UTC))
    try:
        check_kit(context)
        check_certificates(context)
    except CheckFailed as wrong:
        raise ConfigError(f"{wrong.found} {wrong.todo}") from None


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
