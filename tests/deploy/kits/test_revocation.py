"""The list of revoked certificates: signed, never shorter than before, read again when it changes."""

import shutil
from pathlib import Path

from pytest import importorskip, raises

importorskip("cryptography")

from wardround.deploy import limits
from wardround.deploy.kits.authority import Authority
from wardround.deploy.kits.enrolment import revoke
from wardround.deploy.kits.kit import read_kit
from wardround.deploy.kits.project import Project
from wardround.deploy.kits.provisioning import provision
from wardround.deploy.kits.revocation import Revocations
from wardround.errors import ConfigError


def test_a_list_is_read_when_it_changes(mine: Path) -> None:
    seen = Revocations(read_kit(mine / "organiser"))
    assert not seen.refresh() and seen.number == 0
    revoke(mine, "north")
    serials = {name: int(Authority.load(mine / ".authority").issued[name][0]) for name in ("north", "south")}
    assert seen.refresh() and not seen.refresh()
    assert serials["north"] in seen and serials["south"] not in seen
    revoke(mine, "south")
    assert seen.refresh() and serials["north"] in seen and serials["south"] in seen


def test_a_list_that_is_damaged_foreign_old_or_huge_is_refused_and_the_last_one_stays(
    mine: Path, project: Project, tmp_path: Path
) -> None:
    seen = Revocations(read_kit(mine / "organiser"))
    revoke(mine, "north")
    first = seen.path.read_bytes()
    revoke(mine, "south")
    assert seen.refresh() and seen.number == 2
    provision(project, tmp_path / "other", bind="127.0.0.1")
    foreign = revoke(tmp_path / "other", "north")
    assert foreign is not None
    for content, words in (
        (b"nothing", "cannot be read"),
        (foreign.read_bytes(), "not signed by the project's authority"),
        (first, "older than the list before"),
        (b"x" * (limits.REVOCATION_BYTES + 1), "too large"),
    ):
        seen.path.write_bytes(content)
        with raises(ConfigError, match=words):
            seen.refresh()
        assert seen.number == 2 and int(Authority.load(mine / ".authority").issued["south"][0]) in seen


def test_only_who_has_a_kit_is_revoked_and_never_the_organiser(mine: Path) -> None:
    with raises(ConfigError, match="no kit of 'nort'. Did you mean 'north'?"):
        revoke(mine, "nort")
    with raises(ConfigError, match="the organiser's kit cannot be revoked"):
        revoke(mine, "organiser")
    with raises(ConfigError, match="has no authority"):
        revoke(mine / "north", "north")
    shutil.rmtree(mine / "organiser")
    assert revoke(mine, "north") is None and (mine / ".authority" / "revoked.crl").exists()
