"""manifest.json: checksums of a kit's files, signed by the project's authority."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from wardround.deploy.kits import Kit
from wardround.deploy.nvflare.authority import Authority
from wardround.files import write_json

MANIFEST_SCHEMA = "wardround-manifest-1"


def write_manifest(kit: Kit, authority: Authority) -> None:
    """Checksums of all that must not change, signed; keys are checked against their certificates instead."""
    own = (kit.site_file, kit.folder / "manifest.json")
    files = {
        path.relative_to(kit.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(kit.folder.rglob("*"))
        if path.is_file() and path.suffix != ".key" and path not in own
    }
    signature = authority.sign(encode_manifest(kit.project_id, kit.name, files))
    manifest = {"schema": MANIFEST_SCHEMA, "files": files, "signature": signature}
    write_json(kit.folder / "manifest.json", manifest)


def encode_manifest(project_id: str, name: str, files: Mapping[str, str]) -> bytes:
    """What is signed: the checksums, and whose kit they are of."""
    plain = {"schema": MANIFEST_SCHEMA, "project_id": project_id, "name": name, "files": dict(files)}
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
