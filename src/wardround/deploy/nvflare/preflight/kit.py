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

from wardround.deploy.kits import Kit
from wardround.deploy.nvflare.authority import ADMIN, SIGNATURE, authority_of, fingerprint
from wardround.deploy.nvflare.manifest import MANIFEST_SCHEMA, manifest_text
from wardround.deploy.nvflare.preflight.checks import NEW_KIT, TIMEOUT, Check, Place, Wrong, warning
from wardround.errors import ConfigError

SOON = timedelta(days=14)


def check_kit(place: Place) -> Check | str:
    """All files are there and as they were signed; a changed file in local/ is the owner's to answer for."""
    kit = place.kit
    again = "Unpack the kit again, or ask the organiser for a new one."
    try:
        manifest = json.loads((kit.folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["schema"] != MANIFEST_SCHEMA:
            raise ValueError(f"schema {manifest['schema']!r}")
        files, signature = dict(manifest["files"]), base64.b64decode(manifest["signature"])
        authority = authority_of(kit)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Wrong(
            f"{kit.folder} is not whole: manifest.json or rootCA.pem cannot be read ({first_words(error)}).",
            again,
        ) from None
    public = authority.public_key()
    assert isinstance(public, rsa.RSAPublicKey)
    try:
        public.verify(signature, manifest_text(kit.project_id, kit.name, files), SIGNATURE, hashes.SHA256())
    except InvalidSignature:
        raise Wrong(
            f"{kit.folder}/manifest.json does not have the signature of the project's authority.", again
        ) from None
    changed = []
    for name, digest in files.items():
        file = kit.folder / name
        if not file.is_file():
            raise Wrong(f"{file} is missing.", again)
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            changed.append(name)
    grave = [name for name in changed if "/local/" not in name and name != "README.txt"]
    if grave:
        raise Wrong(f"{kit.folder / grave[0]} is not as it was signed.", again)
    keys = {key.relative_to(kit.folder).as_posix() for key in kit.keys}
    lost = {name.removesuffix(".crt") + ".key" for name in files if name.endswith(".crt")} - keys
    if lost:
        raise Wrong(f"{kit.folder / min(lost)} is missing.", again)
    if changed:
        return warning(f"changed since the kit was made: {', '.join(changed)}", "See that you changed it.")
    return (
        f"{kit.role} '{kit.name}' of project '{kit.project}', {len(files)} files as signed; "
        f"authority {fingerprint(authority)}"
    )


def check_certificates(place: Place) -> Check | str:
    """Each certificate comes from the project's authority, fits its key and its owner, and is in date."""
    kit, authority = place.kit, authority_of(place.kit)
    if kit.role == "hospital":
        pairs = [(kit.startup / "client.crt", kit.name)]
    else:
        pairs = [(kit.startup / "server.crt", kit.server), (kit.admin / "startup" / "client.crt", ADMIN)]
    ends = [check_dates(kit.startup / "rootCA.pem", authority, place.now)]
    for path, owner in pairs:
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            key = serialization.load_pem_private_key(path.with_suffix(".key").read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise Wrong(f"{path} or its key cannot be read ({first_words(error)}).", NEW_KIT) from None
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            raise Wrong(f"{path} was not issued by this project's authority (rootCA.pem).", NEW_KIT) from None
        if certificate.public_key() != key.public_key():
            raise Wrong(f"{path.with_suffix('.key')} is not the key of {path.name}.", NEW_KIT)
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if [name.value for name in names] != [owner]:
            raise Wrong(f"{path} is the certificate of {names[0].value!r}, not of '{owner}'.", NEW_KIT)
        ends.append(check_dates(path, certificate, place.now))
    left = min(ends) - place.now
    if left < SOON:
        return warning(f"good for {left.days} more days, until {day(min(ends))}", NEW_KIT)
    return f"good until {day(min(ends))}"


def first_words(error: Exception) -> str:
    """Why a file cannot be read, in short; OpenSSL's reasons go on with advice for programmers."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error).partition(". See ")[0]


def refuse_broken(kit: Kit, now: datetime | None = None) -> None:
    """A kit that is not whole, or whose certificates do not hold, is an error before anything is started."""
    place = Place(kit, None, now or datetime.now(UTC), TIMEOUT)
    try:
        check_kit(place)
        check_certificates(place)
    except Wrong as wrong:
        raise ConfigError(f"{wrong.found} {wrong.todo}") from None


def check_dates(path: Path, certificate: x509.Certificate, now: datetime) -> datetime:
    """The end of a certificate that is in date."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        raise Wrong(
            f"{path} is valid from {start:%Y-%m-%d %H:%M} UTC on, but this machine says it is "
            f"{now:%Y-%m-%d %H:%M} UTC.",
            "Set this machine's clock.",
        )
    if now > end:
        raise Wrong(f"{path} expired on {day(end)} (this machine says it is {day(now)}).", NEW_KIT)
    return end


def day(time: datetime) -> str:
    return f"{time:%Y-%m-%d}"
