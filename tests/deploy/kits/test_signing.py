"""Hospitals in a secure sum: each signs with its kit's key, and knows the others by their certificates."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from pytest import MonkeyPatch, fixture, importorskip, mark, raises

importorskip("cryptography")

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from summing import CONTEXT, Sum
from wardround.deploy.kits.authority import SIGNATURE, Authority
from wardround.deploy.kits.enrolment import encode_certificate, revoke
from wardround.deploy.kits.kit import Kit, read_kit
from wardround.deploy.kits.private_key import encode_key, load_key
from wardround.deploy.kits.project import Project
from wardround.deploy.kits.provisioning import provision
from wardround.deploy.kits.signing import site_identity
from wardround.deploy.kits.statements import sign_statement, tag_statement
from wardround.privacy.secure_sum import Coordinator, Identity, Member, SumRefusal

DATA = b"statement"
DAY = timedelta(days=1)


@fixture
def north(kits: Path) -> Identity:
    return site_identity(read_kit(kits / "north"))


@fixture
def south(kits: Path) -> Identity:
    return site_identity(read_kit(kits / "south"))


def issue(kits: Path, name: str = "south", **changes: Any) -> tuple[str, bytes]:
    """A certificate of the project's authority, and a signature with its key."""
    terms = {"role": "hospital", "valid": DAY, **changes}
    certificate, key = Authority.load(kits / ".authority").issue(name, "South", **terms)
    data = tag_statement(read_kit(kits / "south"), DATA)
    return encode_certificate(certificate), key.sign(data, SIGNATURE, hashes.SHA256())


def test_hospitals_verify_each_other_and_the_organiser_verifies_them(
    kits: Path, north: Identity, south: Identity
) -> None:
    signature = south.sign(DATA)

    for verifier in (north, south, site_identity(read_kit(kits / "organiser"))):
        verifier.verify("south", south.certificate, signature, DATA)


def test_a_sum_of_hospitals_is_exact(project: Project, tmp_path: Path) -> None:
    three = project.model_copy(update={"hospitals": tuple(
        project.hospitals[0].model_copy(update={"name": name}) for name in ("east", "north", "south")
    )})  # fmt: skip
    provision(three, tmp_path / "kits", bind="127.0.0.1")
    one = Sum(count=3, threshold=2)
    one.names = one.alive = ["east", "north", "south"]
    one.values = dict(zip(one.names, one.values.values(), strict=True))
    one.members = {
        name: Member(
            name,
            context=CONTEXT,
            identity=site_identity(read_kit(tmp_path / "kits" / name)),
            threshold=2,
        )
        for name in one.names
    }
    organiser = site_identity(read_kit(tmp_path / "kits" / "organiser"))
    one.coordinator = Coordinator(CONTEXT, 2, 40, identity=organiser)
    one.run()

    assert np.array_equal(one.coordinator.total(), one.plain(one.names))


@mark.parametrize(
    ("changes", "why"),
    [
        ({"name": "west"}, "is not of that name"),
        ({"start": datetime.now(UTC) - 3 * DAY}, "is valid from"),
        ({"start": datetime.now(UTC) + DAY}, "is valid from"),
        ({"role": "organiser"}, "is not a hospital's"),
    ],
    ids=["renamed", "expired", "not yet valid", "the organiser's"],
)
def test_a_certificate_that_is_not_good_is_refused_by_name(
    kits: Path, north: Identity, changes: dict[str, Any], why: str
) -> None:
    certificate, signature = issue(kits, **changes)

    with raises(SumRefusal, match=f"the certificate of 'south' {why}") as caught:
        north.verify("south", certificate, signature, DATA)

    assert caught.value.member == "south"


def test_a_certificate_of_another_authority_is_refused(
    project: Project, north: Identity, tmp_path: Path
) -> None:
    provision(project, tmp_path / "other", bind="127.0.0.1")
    foreign = site_identity(read_kit(tmp_path / "other" / "south"))

    with raises(SumRefusal, match="the certificate of 'south' is not of the project's authority"):
        north.verify("south", foreign.certificate, foreign.sign(DATA), DATA)


@mark.parametrize("text", ["", "ä", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_refused(north: Identity, text: str) -> None:
    with raises(SumRefusal, match="is not of the project's authority"):
        north.verify("south", text, b"", DATA)


def test_a_certificate_of_a_weak_or_strange_key_is_refused(kits: Path, north: Identity) -> None:
    authority = Authority.load(kits / ".authority")
    for key in (rsa.generate_private_key(65537, 1024), ec.generate_private_key(ec.SECP256R1())):
        public: Any = key.public_key()
        certificate = authority.certify(public, "south", "South", role="hospital", valid=DAY)
        with raises(SumRefusal, match="key that is not RSA of 2048"):
            north.verify("south", encode_certificate(certificate), b"", DATA)


def test_a_revoked_certificate_is_refused_where_the_list_is_known(mine: Path) -> None:
    north, south = (read_kit(mine / name) for name in ("north", "south"))
    statement = (site_identity(south).certificate, sign_statement(south, DATA), DATA)
    hospital, organiser = site_identity(north), site_identity(read_kit(mine / "organiser"))
    listed = revoke(mine, "south")
    assert listed is not None

    with raises(SumRefusal, match="the certificate of 'south' was revoked"):
        organiser.verify("south", *statement)
    hospital.verify("south", *statement)  # hospitals get no list, unless somebody puts it there
    shutil.copy(listed, north.state)
    with raises(SumRefusal, match="the certificate of 'south' was revoked"):
        hospital.verify("south", *statement)


def test_a_signature_over_something_else_is_refused(north: Identity, south: Identity) -> None:
    for signature in (south.sign(b"another"), north.sign(DATA), b""):
        with raises(SumRefusal, match="the signature of 'south' is not valid"):
            north.verify("south", south.certificate, signature, DATA)


def test_a_signature_is_good_for_nothing_but_statements_of_this_project(kits: Path) -> None:
    """A process that reads foreign messages may be made to ask for one: a renewal is not what it gets."""
    kit = read_kit(kits / "north")
    signature = sign_statement(kit, DATA)
    public = load_key(kit.own_key).public_key()

    public.verify(signature, tag_statement(kit, DATA), SIGNATURE, hashes.SHA256())
    with raises(InvalidSignature):
        public.verify(signature, DATA, SIGNATURE, hashes.SHA256())


def test_a_renewed_key_is_taken_at_once_and_one_with_a_passphrase_too(
    mine: Path, monkeypatch: MonkeyPatch, copy_of: Callable[[str], Kit]
) -> None:
    from wardround.deploy.kits import private_key

    kit = copy_of("south")
    identity = site_identity(kit)
    authority = Authority.load(mine / ".authority")
    certificate, key = authority.issue("south", "South", role="hospital", valid=DAY)
    kit.own_key.write_bytes(encode_key(key, b"long enough"))
    kit.own_certificate.write_text(encode_certificate(certificate))
    private_key.read_environment.cache_clear()
    private_key.ask_passphrase.cache_clear()
    monkeypatch.setenv(private_key.PASSPHRASE, "long enough")

    signature = identity.sign(DATA)

    private_key.read_environment.cache_clear()
    site_identity(read_kit(mine / "north")).verify("south", identity.certificate, signature, DATA)
