"""preflight: before the first round, the first thing that would go wrong, and what to do about it.

    checks = preflight(Path("kits/north"), data=Path("federation.yaml"))

Checks run in the order in which things would fail: the kit, its certificates, the way to the organiser, the
encrypted connection with both certificates, the clock, the disk, the versions, the data. The first failure
ends it, and the checks after it are "not reached". Nothing about the data leaves this machine.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from wardround.data import federation_file
from wardround.data.checking.check import check_quickly
from wardround.data.checking.findings import format_split_counts
from wardround.data.sources import list_cases
from wardround.deploy.kits.kit import open_kit
from wardround.deploy.preflight import TIMEOUT, Check, CheckFailed, PreflightContext, warn
from wardround.deploy.preflight.connection import check_name, check_own_port, check_port, check_tls
from wardround.deploy.preflight.kit import check_certificates, check_kit
from wardround.deploy.site import choose_device
from wardround.deploy.site_file import find_client, load_site
from wardround.errors import WardroundError
from wardround.text import clipped
from wardround.version import __version__

LARGEST_DRIFT = timedelta(minutes=5)
ENOUGH_DISK = 5_000_000_000
# what this version of wardround was tested with: from, up to but without
TESTED = {"torch": ((2, 6), (3,)), "grpcio": ((1, 66, 2), (2,))}


# This machine: clock, disk, versions, device, and the hospital's data


def check_clock(context: PreflightContext) -> Check | str:
    assert context.clock is not None  # the server's answer has it
    seconds = context.clock.total_seconds()
    if abs(context.clock) > LARGEST_DRIFT:
        ahead = "ahead of" if seconds < 0 else "behind"
        return warn(
            f"{abs(seconds) / 60:.0f} minutes {ahead} the server's clock", "Set this machine's clock (NTP)."
        )
    return f"{abs(seconds):.0f} s from the server's"


def check_disk(context: PreflightContext) -> Check | str:
    free = shutil.disk_usage(context.kit.folder).free
    text = f"{free / 1e9:.0f} GB free" if free >= 1e10 else f"{free / 1e9:.1f} GB free"
    if free < ENOUGH_DISK:
        return warn(
            f"{text} where the kit is", f"Models and prepared cases need {ENOUGH_DISK / 1e9:g} GB or more."
        )
    return text


def check_versions(context: PreflightContext) -> Check | str:
    """Installed, of the tested range, and wardround the same as the organiser's."""
    found, odd = {"wardround": __version__}, []
    for name, (first, end) in TESTED.items():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise CheckFailed(f"{name} is not installed.", "pip install 'wardround[hospitals]'") from None
        if not first <= parse_version(found[name]) < end:
            tested = f"{'.'.join(map(str, first))} up to, not including, {'.'.join(map(str, end))}"
            odd.append(f"{name} {found[name]} was not tested ({tested})")
    server = clipped(context.server_version or context.kit.version)
    if parse_version(server)[:2] != parse_version(__version__)[:2]:
        place = "at the server" if context.server_version else "where the kit was made"
        odd.append(f"wardround is {__version__} here and {server} {place}")
    if odd:
        return warn("; ".join(odd), f"pip install 'wardround[hospitals]=={server}'")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def parse_version(version: str) -> tuple[int, ...]:
    """
    >>> parse_version("2.9.0"), parse_version("2.13.0+cu126"), parse_version("2.10rc1")
    ((2, 9, 0), (2, 13, 0), (2, 10))
    """
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_device(context: PreflightContext) -> str:
    """site.yaml can be read, and its device exists here."""
    return f"training runs on {choose_device(load_site(context.kit.site_file))}"


def check_data(context: PreflightContext) -> Check | str:
    """federation.yaml opens, and this hospital has training cases in it. The result stays here."""
    site = load_site(context.kit.site_file)
    source = context.data if context.data is not None else site.data
    if not isinstance(source, Path):
        return "synthetic cases (site.yaml: data is phantom)"
    if context.data is None and not source.exists():
        return warn(
            f"not checked: {source} does not exist yet",
            "Name your federation.yaml in site.yaml, or give it with --data.",
        )
    file = federation_file.load(source)
    base = source.parent
    listing = list_cases(file, base)
    training = [name for name in listing.clients if name not in file.held_out]
    inside = find_client(site, training, context.kit.name)
    report = check_quickly(listing, file, base=base)
    own = [entry for entry in report.usable if entry.client == inside]
    if not any(entry.split == "train" for entry in own):
        raise CheckFailed(
            f"{source}: client '{inside}' has no usable training case.",
            f"See why with: wardround data check {source}",
        )
    left = sum(entry.client == inside for entry in report.left_out)
    text = f"client '{inside}': {len(own)} usable cases ({format_split_counts(own)})"
    if left:
        return warn(f"{text}, {left} left out", f"See why with: wardround data check {source}")
    return text


Step = tuple[str, Callable[[PreflightContext], Check | str]]
HOSPITAL: list[Step] = [
    ("kit", check_kit),
    ("certificate", check_certificates),
    ("name", check_name),
    ("port", check_port),
    ("encryption", check_tls),
    ("clock", check_clock),
    ("disk", check_disk),
    ("versions", check_versions),
    ("device", check_device),
    ("data", check_data),
]
ORGANISER: list[Step] = [
    ("kit", check_kit),
    ("certificate", check_certificates),
    ("port", check_own_port),
    ("disk", check_disk),
    ("versions", check_versions),
]


def preflight(
    folder: Path, *, data: Path | None = None, now: datetime | None = None, timeout: float = TIMEOUT
) -> list[Check]:
    """Every check in order; none runs after one that fails."""
    try:
        kit = open_kit(folder)
    except WardroundError as error:
        return [Check("kit", "wrong", str(error)), *mark_unreached(HOSPITAL[1:])]
    context = PreflightContext(kit, data, now or datetime.now(UTC), timeout)
    steps = HOSPITAL if kit.role == "hospital" else ORGANISER
    done: list[Check] = []
    for number, (name, look) in enumerate(steps):
        try:
            seen = look(context)
            done.append(Check(name, "ok", seen) if isinstance(seen, str) else replace(seen, name=name))
        except CheckFailed as wrong:
            done.append(Check(name, "wrong", wrong.found, wrong.todo))
        except WardroundError as error:
            done.append(Check(name, "wrong", str(error)))
        if done[-1].state == "wrong":
            return [*done, *mark_unreached(steps[number + 1 :])]
    return done


def mark_unreached(steps: Sequence[Step]) -> list[Check]:
    return [Check(name, "not reached") for name, _ in steps]


def find_failed(checks: Sequence[Check]) -> Check | None:
    return next((check for check in checks if check.state == "wrong"), None)
