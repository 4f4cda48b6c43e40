"""What a release is made of: the same bytes from two builds, an SBOM, and the licence of every package.

`make release` calls these; each raises SystemExit where something is wrong.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

CLASSIFIERS = {  # the older way to name a licence
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: ISC License (ISCL)": "ISC",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "License :: OSI Approved :: Python Software Foundation License": "PSF-2.0",
}
# Packages whose metadata names the licence in words of their own: as read in their LICENSE file.
READ_BY_HAND = {"monai": "Apache-2.0", "protobuf": "BSD-3-Clause"}
# Permissive, or MPL-2.0, which asks only for the sources of its own files.
ALLOWED = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0",
    "CC0-1.0", "ISC", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib",
}  # fmt: skip
# CUDA's libraries come with torch for NVIDIA GPUs, under NVIDIA's terms.
NVIDIA = re.compile(r"nvidia[-_].*|cuda[-_].*")


def check_reproducible(build: Callable[[Path, Path], Any], root: Path, dist: Path) -> dict[str, str]:
    """Build a copy of the tracked files, elsewhere, later and with other modes: SHA-256 by file name.

    build: makes the files of a source folder in another.
    """
    with tempfile.TemporaryDirectory(prefix="wardround-again-") as place:
        copy = Path(place) / "elsewhere"
        listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / name, copy / name)
                (copy / name).chmod(0o600)
                os.utime(copy / name, (2**30, 2**30))
        build(Path(place) / "dist", copy)
        first, second = hash_files(dist), hash_files(Path(place) / "dist")
    if first != second:
        differ = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
        raise SystemExit(f"A second build has other bytes: {', '.join(differ)}.")
    return first


def hash_files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def describe_environment(python: str, stem: Path) -> None:
    """Write the SBOM (CycloneDX JSON) and the licences (CSV) of an environment; stem: how both begin."""
    sbom = write_sbom(python, stem.with_name(f"{stem.name}.cdx.json"))
    missing = find_missing(sbom, list_installed(python))
    if missing:
        raise SystemExit(f"The SBOM lacks {', '.join(missing)}.")
    rows = list_licences(sbom)
    with stem.with_name(f"{stem.name}-licences.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("package", "version", "licence"), *rows])
    check_licences(rows)
    print(f"SBOM: {len(rows)} packages, all that are installed; every licence is allowed")


def write_sbom(python: str, path: Path) -> Mapping[str, Any]:
    """The bill of materials of an environment, the same bytes each time, without places on this machine."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON"]
    subprocess.run([*command, "-o", str(path), python], check=True)
    sbom: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for part in sbom["components"]:
        places = [one for one in part.get("externalReferences", ()) if not one["url"].startswith("file:")]
        part.pop("externalReferences", None)
        part |= {"externalReferences": places} if places else {}
    path.write_text(json.dumps(sbom, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return sbom


def list_installed(python: str) -> list[str]:
    command = [python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return [entry["name"] for entry in json.loads(found.stdout)]


def find_missing(sbom: Mapping[str, Any], installed: Sequence[str]) -> list[str]:
    listed = {normalise(part["name"]) for part in sbom["components"]}
    return sorted(name for name in installed if normalise(name) not in listed)


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def list_licences(sbom: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Package, version and licence of every component."""
    return sorted((part["name"], part["version"], name_licence(part)) for part in sbom["components"])


def name_licence(part: Mapping[str, Any]) -> str:
    """SPDX where the package says so, by identifier, expression or classifier; else its own words."""
    found = []
    for entry in part.get("licenses", ()):
        licence = entry.get("license", {})
        name = entry.get("expression") or licence.get("id") or licence.get("name", "")
        found.append(CLASSIFIERS.get(name, name))
    return " AND ".join(dict.fromkeys(found)) or READ_BY_HAND.get(normalise(part["name"]), "not known")


def check_licences(rows: Sequence[tuple[str, str, str]]) -> None:
    wrong = [
        f"{name} {version} ({licence})"
        for name, version, licence in rows
        if not NVIDIA.fullmatch(name) and not is_allowed(licence)
    ]
    if wrong:
        raise SystemExit(f"Licences that are not on the list in tools/supply_chain.py: {'; '.join(wrong)}.")


def is_allowed(licence: str) -> bool:
    """Whether every part of an expression is allowed, and of alternatives at least one.

    >>> is_allowed("MIT AND (GPL-2.0-only OR Apache-2.0)"), is_allowed("MIT AND GPL-2.0-only")
    (True, False)
    """
    parts = [part.split(" OR ") for part in licence.split(" AND ")]
    return all(any(choice.strip("() ") in ALLOWED for choice in choices) for choices in parts)
