"""Kits: what they hold, who may read them, and what provisioning again leaves alone."""

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from helpers import call
from pytest import CaptureFixture, MonkeyPatch, fixture, importorskip, mark, raises

from wardround.deploy.kits.kit import SIGNED, Kit, find_organisers_kit, open_kit
from wardround.deploy.kits.project import Project, load_project, render_template
from wardround.deploy.site_file import load_site
from wardround.errors import ConfigError

SMALLEST: dict[str, Any] = {"project": "demo", "organiser": {"host": "localhost"}, "hospitals": ["north"]}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# project.yaml


def test_the_example_is_a_project(tmp_path: Path) -> None:
    (tmp_path / "project.yaml").write_text(render_template())

    project = load_project(tmp_path / "project.yaml")

    assert [hospital.name for hospital in project.hospitals] == ["north", "south"]
    assert [hospital.certified_organisation for hospital in project.hospitals] == ["north", "South_Trust"]


@mark.parametrize(
    ("change", "sentence"),
    [
        ({"hospitals": ["north", "North"]}, "hospitals 'north' and 'North' have the same name"),
        ({"hospitals": ["north", "north"]}, "have the same name"),
        ({"hospitals": ["../etc"]}, "hospitals.0.name: '../etc' is not a valid name; use up to 48 letters"),
        ({"hospitals": ["a b"]}, "is not a valid name"),
        ({"hospitals": ["-x"]}, "is not a valid name"),
        ({"hospitals": ["nord\n"]}, "is not a valid name"),
        ({"hospitals": ["Server"]}, "cannot be called 'Server'"),
        ({"hospitals": ["pooled"]}, "cannot be called 'pooled'"),
        ({"hospitals": []}, "hospitals"),
        ({"hospitals": [{"nam": "north"}]}, "hospitals.0.name is missing"),
        ({"project": "my project"}, "project: 'my project' is not a valid name"),
        ({"organiser": {"host": "https://x.org"}}, "organiser.host: 'https://x.org' is not a host"),
        ({"organiser": {"host": "x.org:8002"}}, "is not a host"),
        ({"organiser": {"host": "x.org", "port": 0}}, "organiser.port is 0; it must be"),
        ({"organiser": {"hst": "x.org"}}, "organiser.host is missing"),
        ({"organiser": {"host": "x", "organisation": "St. Mary"}}, "'St. Mary' is not a valid organisation"),
        ({"valid_day": 3}, "valid_day is not a setting. Did you mean 'valid_days'?"),
        ({"valid_days": 0}, "valid_days is 0"),
    ],
)
def test_a_mistake_in_the_project_is_named(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "project.yaml"
    path.write_text(yaml.safe_dump(SMALLEST | change))

    with raises(ConfigError) as told:
        load_project(path)

    assert sentence in str(told.value) and str(told.value).startswith(str(path))


# What a kit holds


def test_keys_and_their_folders_are_for_the_owner_alone(kits: Path) -> None:
    private = [*kits.rglob("*.key"), *kits.rglob("*.crt"), *kits.rglob("kit.json")]
    closed = [kits / ".authority", *kits.glob("*/"), *{path.parent for path in private}]

    assert len(list(kits.rglob("*.key"))) == 4  # authority, organiser, two hospitals
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in closed} == {0o700}


def test_the_authority_is_in_no_kit(kits: Path) -> None:
    secret = (kits / ".authority" / "ca.key").read_bytes()
    for name in ("organiser", "north", "south"):
        assert secret not in contents(kits / name).values()
    assert not list((kits / ".authority").glob("making-*"))


def test_a_kit_can_be_opened_anywhere(kits: Path, project: Project) -> None:
    for name in ("organiser", "north"):
        kit = open_kit(kits / name)
        assert (kit.name, kit.server, kit.port) == (name, "localhost", project.organiser.port)
        for path, content in contents(kits / name).items():
            assert str(kits).encode() not in content and b"/tmp" not in content, path
    load_site(kits / "north" / "site.yaml")
    assert open_kit(kits / "organiser").listen == "127.0.0.1" and open_kit(kits / "north").listen is None


def test_a_kit_holds_keys_rules_and_nothing_of_an_engine(kits: Path) -> None:
    def names(name: str) -> list[str]:
        return sorted(path.relative_to(kits / name).as_posix() for path in (kits / name).rglob("*"))

    both = ["README.txt", "keys", "keys/authority.crt", "keys/own.crt", "keys/own.key", "kit.json", "logs"]
    both += ["manifest.json", "state"]
    assert names("north") == sorted([*both, "site.yaml"])
    assert names("organiser") == sorted([*both, "runs"])
    assert list(json.loads((kits / "north" / "manifest.json").read_text())["files"]) == list(SIGNED)
    for name in ("organiser", "north"):
        assert "pip install 'wardround[hospitals]==" in (kits / name / "README.txt").read_text()


def test_the_server_listens_where_it_should(project: Project, tmp_path: Path) -> None:
    from wardround.deploy.kits.provisioning import provision

    provision(project, tmp_path)

    assert open_kit(tmp_path / "organiser").listen == "0.0.0.0"
    with raises(ConfigError, match="bind is '10.0.0.1'"):
        provision(project, tmp_path, bind="10.0.0.1")


def test_a_certificate_says_who_may_serve_and_who_may_connect(kits: Path) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def read(name: str) -> tuple[list[Any], str, int]:
        certificate = x509.load_pem_x509_certificate((kits / name / "keys" / "own.crt").read_bytes())
        subject = [
            certificate.subject.get_attributes_for_oid(kind)[0].value
            for kind in (NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME)
        ]
        others = [
            item for item in certificate.extensions if isinstance(item.value, x509.SubjectAlternativeName)
        ]
        uses = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        return subject, uses, len(others)

    assert read("organiser") == (["localhost", "organiser"], [ExtendedKeyUsageOID.SERVER_AUTH], 1)
    assert read("north") == (["north", "hospital"], [ExtendedKeyUsageOID.CLIENT_AUTH], 0)


def test_opening_a_kit_imports_little() -> None:
    """`status` and `stop` open one."""
    code = (
        "import sys\n"
        "def held(*names): return [name for name in names if name in sys.modules]\n"
        "from wardround.deploy.kits import kit\n"
        "assert not held('torch', 'nvflare', 'grpc', 'cryptography'), held('torch', 'nvflare', 'grpc')\n"
        "from wardround.deploy.preflight import kit\n"
        "assert not held('torch', 'nvflare', 'grpc'), held('torch', 'nvflare', 'grpc')\n"
        "from wardround.deploy.preflight import connection\n"
        "assert not held('torch', 'nvflare'), held('torch', 'nvflare')\n"
        "from wardround.deploy.kits import enrolment\n"  # `revoke` must not take long
        "assert not held('torch', 'nvflare'), held('torch', 'nvflare')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


# Provisioning again


@fixture
def made(kits: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kits, tmp_path / "kits"))


def with_hospitals(project: Project, *names: str) -> Project:
    return Project.model_validate({**project.model_dump(), "hospitals": list(names)})


def test_one_more_hospital_leaves_the_others_as_they_are(made: Path, project: Project) -> None:
    from wardround.deploy.kits.provisioning import provision

    before = {name: contents(made / name) for name in ("organiser", "north", "south")}
    shutil.rmtree(made / "south")  # it was sent

    kits = provision(with_hospitals(project, "north", "south", "east"), made, bind="127.0.0.1")

    assert [kit.name for kit in kits] == ["organiser", "north", "east"]
    assert contents(made / "north") == before["north"] and contents(made / "organiser") == before["organiser"]
    assert contents(made / "east")["keys/authority.crt"] == before["north"]["keys/authority.crt"]
    assert len({kit.project_id for kit in kits}) == 1
    assert not (made / "south").exists()


def test_a_lost_kit_is_made_anew_when_asked(made: Path, project: Project) -> None:
    from wardround.deploy.kits.provisioning import provision

    old = contents(made / "south")
    with raises(ConfigError, match="south exists already, and nothing is overwritten"):
        provision(project, made, bind="127.0.0.1", renew=["south"])
    assert contents(made / "south") == old
    with raises(ConfigError, match="'west' is not in the project"):
        provision(project, made, bind="127.0.0.1", renew=["west"])

    shutil.rmtree(made / "south")
    provision(project, made, bind="127.0.0.1", renew=["south"])
    assert contents(made / "south")["keys/own.crt"] != old["keys/own.crt"]


@mark.parametrize(
    ("change", "sentence"),
    [
        ({"project": "other"}, "whose project is 'demo'; project.yaml says 'other'"),
        ({"organiser": {"host": "elsewhere.example.org"}}, "whose host is 'localhost'"),
    ],
)
def test_another_project_or_place_is_refused(
    change: dict[str, Any], sentence: str, made: Path, project: Project
) -> None:
    from wardround.deploy.kits.provisioning import provision

    before = contents(made)
    with raises(ConfigError, match=sentence):
        provision(Project.model_validate({**project.model_dump(), **change}), made, bind="127.0.0.1")
    assert contents(made) == before


def test_what_lies_in_the_way_is_not_overwritten(tmp_path: Path, project: Project) -> None:
    importorskip("cryptography")
    from wardround.deploy.kits.provisioning import provision

    (tmp_path / "north").mkdir()
    (tmp_path / "north" / "thesis.txt").write_text("mine")
    with raises(ConfigError, match="north exists already"):
        provision(project, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["north"]


def test_a_broken_authority_is_said(made: Path, project: Project) -> None:
    from wardround.deploy.kits.provisioning import provision

    (made / ".authority" / "ca.key").write_text("nothing")
    with raises(ConfigError, match="not a readable authority"):
        provision(project, made, bind="127.0.0.1")


# Opening


def test_what_is_no_kit_is_said_kindly(kits: Path, tmp_path: Path) -> None:
    with raises(ConfigError, match="does not exist. Give the folder of your kit"):
        open_kit(tmp_path / "nowhere")
    with raises(ConfigError, match="is not a kit. It has no kit.json"):
        open_kit(tmp_path)
    with raises(ConfigError, match="It holds the kits north, organiser, south; give one of them"):
        open_kit(kits)
    with raises(
        ConfigError, match="is the hospital's kit of 'north', but this command needs the kit of the organiser"
    ):
        open_kit(kits / "north", "organiser")
    assert open_kit(kits / "north" / "kit.json", "hospital").name == "north"


@mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"schema": "wardround-kit-9"}', "this wardround reads wardround-kit-2"),
        ('{"schema": "wardround-kit-2"}', "cannot be read"),
        ("[" * 9000, "cannot be read"),
        (" " * 10_000 + "{}", "cannot be read"),
    ],
)
def test_a_damaged_kit_json_is_said(text: str, sentence: str, copy_of: Callable[[str], Kit]) -> None:
    kit = copy_of("north")
    (kit.folder / "kit.json").write_text(text)
    with raises(ConfigError, match=sentence):
        open_kit(kit.folder)


def test_a_key_that_others_can_read_is_refused(copy_of: Callable[[str], Kit]) -> None:
    kit = copy_of("organiser")
    kit.own_key.chmod(0o644)
    with raises(ConfigError, match=r"may read \(mode 644\). Close it: chmod -R go-rwx"):
        open_kit(kit.folder)


@mark.parametrize("part", ["", "state", "site.yaml"])
def test_a_kit_that_others_can_change_is_refused(part: str, copy_of: Callable[[str], Kit]) -> None:
    kit = copy_of("north")
    (kit.folder / part).chmod(0o770)
    with raises(ConfigError, match=r"can be changed by others on this machine \(mode 770\)"):
        open_kit(kit.folder)


def test_a_kit_of_an_older_version_is_made_again_by_the_same_authority(made: Path, project: Project) -> None:
    from wardround.deploy.kits.provisioning import provision

    file = made / ".authority" / "project.json"  # as the older version wrote it
    file.write_text(json.dumps({**json.loads(file.read_text()), "admin_port": 8003}))
    old = {"schema": "wardround-kit-1", "name": "north", "admin_port": 8003}
    (made / "north" / "kit.json").write_text(json.dumps(old))
    again = "north was made by an older version of wardround.* wardround provision PROJECT --renew north"
    with raises(ConfigError, match=again):
        open_kit(made / "north")
    with raises(ConfigError, match=again):
        provision(with_hospitals(project, "north", "south", "east"), made, bind="127.0.0.1")
    assert not (made / "east").exists()

    (made / "north").rename(made / "north-old")
    provision(project, made, bind="127.0.0.1", renew=["north"])
    assert open_kit(made / "north").project_id == open_kit(made / "south").project_id


# The command


def test_provision_prints_kits_and_what_to_do(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    importorskip("cryptography")
    code, out, err = call(monkeypatch, capsys, "provision", "--example")
    assert (code, out, err) == (0, render_template(), "")
    (tmp_path / "project.yaml").write_text(out)

    arguments = ("provision", str(tmp_path / "project.yaml"), "-o", str(tmp_path / "kits"))
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, err) == (0, "")
    assert "| north | hospital | new |" in out and "What to do next" in out and "Open TCP port 8002" in out

    code, out, err = call(monkeypatch, capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    assert [kit["state"] for kit in json.loads(out)["kits"]] == ["kept", "kept", "kept"]

    code, out, err = call(monkeypatch, capsys, "provision")
    assert code == 2 and "give a project.yaml" in err


def test_without_the_extra_the_command_says_how_to_get_it(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    (tmp_path / "project.yaml").write_text(render_template())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = call(monkeypatch, capsys, "provision", str(tmp_path / "project.yaml"))
    assert code == 2 and "this needs gRPC and cryptography: pip install 'wardround[hospitals]'" in err


# Opening


@mark.parametrize(
    ("name", "change"),
    [
        ("north", {"port": 0}),
        ("north", {"port": 99999}),
        ("north", {"port": True}),
        ("north", {"port": "8002"}),
        ("north", {"role": ["hospital"]}),
        ("north", {"server": "a\u001b[2J"}),
        ("north", {"listen": "0.0.0.0"}),
        ("organiser", {"listen": None}),
        ("organiser", {"listen": "10.0.0.7"}),
    ],
)
def test_a_kit_with_an_impossible_value_is_refused(name: str, change: dict[str, Any], mine: Path) -> None:
    file = mine / name / "kit.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))

    with raises(ConfigError, match="an invalid value"):
        open_kit(mine / name)


def test_a_wrong_wardround_kit_is_not_passed_over(mine: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(mine.parent)
    assert find_organisers_kit(None).folder == mine / "organiser"

    monkeypatch.setenv("WARDROUND_KIT", str(mine / "nowhere"))
    with raises(ConfigError, match="nowhere does not exist"):
        find_organisers_kit(None)
