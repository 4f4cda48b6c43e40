"""Enrolment: keys stay where they were made, and the authority signs only what it should."""

import json
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509
from pytest import MonkeyPatch, fixture, importorskip, mark, raises

importorskip("cryptography")

from wardround.deploy import limits
from wardround.deploy.kits import enrolment
from wardround.deploy.kits.authority import Authority
from wardround.deploy.kits.enrolment import install, request_certificate, revoke, sign
from wardround.deploy.kits.kit import Kit, open_kit
from wardround.deploy.kits.project import Project
from wardround.deploy.kits.provisioning import provision
from wardround.deploy.preflight.kit import refuse_broken
from wardround.deploy.site_file import render_template
from wardround.errors import ConfigError

accept = partial(enrolment.accept, render_rules=render_template)
SCHEMAS = {"invitation": "wardround-invitation-1", "request": "wardround-request-1"}


@fixture(scope="module")
def invited(project: Project, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("invited")
    provision(project, folder, bind="127.0.0.1", invites=True)
    return folder


@fixture
def authority(invited: Path) -> Authority:
    return Authority.load(invited / ".authority")


@fixture
def north(invited: Path, tmp_path: Path) -> Kit:
    return accept(invited / "north.invitation.json", folder=tmp_path / "north")


def change(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return path


def test_an_invitation_holds_no_key_and_the_organisers_folder_no_key_of_a_hospital(invited: Path) -> None:
    assert sorted(path.name for path in invited.iterdir()) == [
        ".authority",
        "north.invitation.json",
        "organiser",
        "south.invitation.json",
    ]
    assert "PRIVATE" not in (invited / "north.invitation.json").read_text()
    assert len(list(invited.rglob("*.key"))) == 2  # authority, organiser


def test_a_kit_that_was_enrolled_is_like_one_that_was_provisioned(
    invited: Path, authority: Authority, north: Kit
) -> None:
    assert stat.S_IMODE(north.next_key.stat().st_mode) == 0o600
    assert "PRIVATE" not in north.request.read_text()
    with raises(ConfigError, match=r"has not come yet. Send north.request.json to the organiser; put the"):
        refuse_broken(north)
    answer, name = sign(authority, north.request, again=True)
    assert answer == north.answer and name == "north" and "PRIVATE" not in answer.read_text()
    install(north)
    opened = open_kit(north.folder, "hospital")
    assert refuse_broken(opened) == "" and not north.next_key.exists()
    certificate = x509.load_pem_x509_certificate(opened.own_certificate.read_bytes())
    assert str(certificate.serial_number) in Authority.load(invited / ".authority").issued["north"]
    with raises(ConfigError, match="waits for no certificate"):
        install(opened)


def test_a_renewal_is_signed_by_the_key_before_and_anyone_elses_request_is_not(
    invited: Path, authority: Authority, tmp_path: Path
) -> None:
    revoke_if_current(authority, invited, "south")
    kit = accept(invited / "south.invitation.json", folder=tmp_path / "south")
    sign(Authority.load(authority.folder), kit.request)
    install(kit)
    old = kit.own_key.read_bytes()

    stranger = accept(invited / "south.invitation.json", folder=tmp_path / "else" / "south")
    with raises(ConfigError, match="'south' has a certificate already, and .* is not signed with its key"):
        sign(Authority.load(authority.folder), stranger.request)

    request_certificate(kit)
    assert refuse_broken(kit) == ""  # the old one serves until the new one comes
    sign(Authority.load(authority.folder), kit.request)
    install(kit)
    assert refuse_broken(kit) == "" and kit.own_key.read_bytes() != old

    revoke(invited, "south")
    request_certificate(kit)
    sign(Authority.load(authority.folder), kit.request)  # after the telephone: nothing current is left
    with raises(ConfigError, match="is the certificate of another key"):
        install(stranger, kit.answer)


def revoke_if_current(authority: Authority, folder: Path, name: str) -> None:
    if authority.is_current(name):
        revoke(folder, name)


def test_a_request_is_signed_for_its_own_name_project_and_key(
    invited: Path, authority: Authority, north: Kit, project: Project, tmp_path: Path
) -> None:
    plain = north.request.read_text()
    for values, words in (
        ({"name": "south"}, "not one that 'south' signed"),
        ({"project_id": "0" * 32}, "is a request to another project"),
        ({"csr": "nothing"}, "no readable signing request"),
        ({"csr": 5}, "no readable signing request"),
        ({"name": "../../etc"}, "is not a whole request"),
    ):
        north.request.write_text(plain)
        with raises(ConfigError, match=words):
            sign(authority, change(north.request, values))
    north.request.write_text(plain)
    provision(project, tmp_path / "other", bind="127.0.0.1")
    with raises(ConfigError, match="is a request to another project"):
        sign(Authority.load(tmp_path / "other" / ".authority"), north.request)
    (authority.folder / "invitations" / "north.json").rename(tmp_path / "kept")
    with raises(ConfigError, match="'north' was not invited"):
        sign(authority, north.request)
    (tmp_path / "kept").rename(authority.folder / "invitations" / "north.json")


def test_a_kit_that_was_provisioned_is_renewed_in_the_same_way(mine: Path) -> None:
    kit = open_kit(mine / "north")
    request_certificate(kit)
    sign(Authority.load(mine / ".authority"), kit.request)
    install(kit)
    assert refuse_broken(open_kit(kit.folder)) == ""


def test_a_short_key_is_not_signed(authority: Authority, north: Kit, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEY_BITS", (3072, 4096))
    with raises(ConfigError, match="is not RSA of 3072 to 4096 bits"):
        sign(authority, north.request)


@mark.parametrize("kind", SCHEMAS)
def test_a_file_that_came_by_mail_is_bounded_and_read_strictly(
    kind: str, authority: Authority, tmp_path: Path
) -> None:
    path = tmp_path / "north.json"
    read: Callable[[Path], Any] = accept if kind == "invitation" else lambda file: sign(authority, file)
    whole = {"schema": SCHEMAS[kind], "name": "north", "files": {}, "csr": "", "project_id": ""}
    for content, words in (
        (b"", "is not readable JSON"),
        (b"[1]", f"is not a {kind}"),
        (b"\xff\xfe", "is not text"),
        (b"[" * 9000, "nested|not readable"),
        (b" " * (limits.LETTER_BYTES + 1), "more than 30,000 bytes"),
        (json.dumps({**whole, "schema": "x"}).encode(), f"is not a {kind}"),
        (json.dumps({**whole, "name": "a b"}).encode(), f"is not a whole {kind}"),
        (json.dumps({**whole, "name": ["north"]}).encode(), f"is not a whole {kind}"),
    ):
        path.write_bytes(content)
        with raises(ConfigError, match=words):
            read(path)
    with raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "nowhere")


def test_an_invitation_that_is_not_one_leaves_no_folder(invited: Path, tmp_path: Path) -> None:
    path = tmp_path / "north.invitation.json"
    plain = json.loads((invited / "north.invitation.json").read_text())
    for files, words in (
        ({**plain["files"], "../evil": "x"}, "does not hold the files of a kit"),
        ({**plain["files"], "kit.json": 5}, "does not hold the files of a kit"),
        ({**plain["files"], "kit.json": "{}"}, "cannot be read"),
        ({**plain["files"], "keys/authority.crt": "x"}, "cannot be used"),
    ):
        path.write_text(json.dumps({**plain, "files": files}))
        with raises(ConfigError, match=words):
            accept(path, folder=tmp_path / "north")
        assert sorted(one.name for one in tmp_path.iterdir()) == [path.name]
    (tmp_path / "north").mkdir()
    with raises(ConfigError, match="exists already, and nothing is overwritten"):
        accept(invited / "north.invitation.json", folder=tmp_path / "north")
