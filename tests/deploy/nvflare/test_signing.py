"""Hospitals on FLARE sign secure sums with the keys of their startup kits, as FLARE itself provisions them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import run

pytest.importorskip("nvflare")

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from deploy.loopback import NAMES, Loopback, conducted
from wardround.deploy.nvflare.executor import WardroundExecutor
from wardround.deploy.nvflare.signing import find_identity
from wardround.deploy.site import Site
from wardround.errors import TooFewClients
from wardround.privacy.secure_sum import Identity, SumRefusal

BUILDERS = ("workspace.WorkspaceBuilder", "static_file.StaticFileBuilder", "cert.CertBuilder")
SECURE: dict[str, Any] = {"privacy": {"secure_sum": True}, "rounds": 1}


def provision(folder: Path) -> Path:
    """Startup kits of a server, three hospitals and an administrator, by FLARE's own command."""
    people = [{"name": name, "type": "client", "org": "org"} for name in NAMES]
    people.append({"name": "localhost", "type": "server", "org": "org", "fed_learn_port": 28002})
    people.append({"name": "admin@org.example", "type": "admin", "org": "org", "role": "lead"})
    builders: list[dict[str, Any]] = [{"path": f"nvflare.lighter.impl.{name}"} for name in BUILDERS]
    builders[1]["args"] = {"config_folder": "config"}
    project = {"api_version": 3, "name": "trial", "description": "", "participants": people}
    folder.mkdir()
    (folder / "project.yml").write_text(yaml.safe_dump({**project, "builders": builders}))
    call = "import sys; from nvflare.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", call, "provision", "-p", "project.yml", "-w", "kits"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "kits" / "trial" / "prod_00"


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return provision(tmp_path_factory.mktemp("flare") / "one")


def identity(kits: Path, name: str) -> Identity:
    found = find_identity(kits / name / "startup")
    assert found is not None
    return found


def with_kit_of(kits: Path, folder: Path, name: str) -> Identity:
    """Whoever signs with the key of another participant's kit."""
    shutil.copytree(kits / "east" / "startup", folder)
    kind = "server" if name == "localhost" else "client"
    for end in ("crt", "key"):
        shutil.copy(kits / name / "startup" / f"{kind}.{end}", folder / f"client.{end}")
    found = find_identity(folder)
    assert found is not None
    return found


def test_hospitals_know_each_other_by_the_root_of_their_federation(kits: Path) -> None:
    east, north = identity(kits, "east"), identity(kits, "north")
    signature = east.sign(b"data")
    north.verify("east", east.certificate, signature, b"data")

    with pytest.raises(SumRefusal, match="signature of 'east' is not valid") as caught:
        north.verify("east", east.certificate, signature, b"other data")
    assert caught.value.member == "east"
    with pytest.raises(SumRefusal, match="'south' is not of that name"):
        north.verify("south", east.certificate, signature, b"data")


@pytest.mark.parametrize("name", ["localhost", "admin@org.example"])
def test_the_server_and_administrators_are_no_hospitals(kits: Path, name: str, tmp_path: Path) -> None:
    other = with_kit_of(kits, tmp_path / "startup", name)
    with pytest.raises(SumRefusal, match=f"'{name}' is not a hospital's"):
        identity(kits, "north").verify(name, other.certificate, other.sign(b"data"), b"data")


def test_another_federation_of_the_same_names_is_refused(kits: Path, tmp_path: Path) -> None:
    other = identity(provision(tmp_path / "two"), "east")
    with pytest.raises(SumRefusal, match="'east' is not of the project's authority"):
        identity(kits, "north").verify("east", other.certificate, other.sign(b"data"), b"data")


def test_a_signature_is_not_over_what_flare_signs(kits: Path) -> None:
    from nvflare.lighter.utils import load_private_key_file, sign_content

    north, east = identity(kits, "north"), identity(kits, "east")
    key = load_private_key_file(str(kits / "east" / "startup" / "client.key"))
    for content in ("eastdata", "data"):  # a name, and what the server asks to have signed after it
        with pytest.raises(SumRefusal, match="signature of 'east' is not valid"):
            north.verify("east", east.certificate, sign_content(content, key, return_str=False), b"data")


def test_where_no_kit_is_or_a_damaged_one_nobody_signs(
    kits: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_identity(tmp_path) is None and not caplog.records  # FLARE's simulator
    shutil.copytree(kits / "east" / "startup", tmp_path / "startup")
    for file, content in (("client.key", "no key"), ("fed_client.json", "{}"), ("rootCA.pem", "")):
        whole = (tmp_path / "startup" / file).read_bytes()
        (tmp_path / "startup" / file).write_text(content)
        assert find_identity(tmp_path / "startup") is None
        (tmp_path / "startup" / file).write_bytes(whole)
    assert len(caplog.records) == 3
    assert all("cannot sign in secure sums" in record.getMessage() for record in caplog.records)


def test_the_executor_signs_with_the_startup_kit_of_its_workspace(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site.yaml").write_text("data: phantom\n")
    monkeypatch.setenv("WARDROUND_SITE", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("WARDROUND_STATE", str(tmp_path / "state"))
    made, context = WardroundExecutor(), FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, "north", private=False, sticky=False)
    workspace = Workspace(root_dir=str(kits / "north"), site_name="north")
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True)
    made.handle_event(EventType.START_RUN, context)

    assert made._site is not None and made._site.identity is not None
    assert made._site.identity.certificate == identity(kits, "north").certificate


def test_sums_over_flares_keys_have_the_bytes_of_train(kits: Path, tmp_path: Path) -> None:
    loop = Loopback(tmp_path / "sites")
    for name, site in loop.sites.items():
        loop.sites[name] = Site(name, loop.rules[name], site._state, identity(kits, name))
    conducted(loop, tmp_path / "run", **SECURE)

    there = json.loads((tmp_path / "run" / "result.json").read_text())
    assert there["params_sha256"] == run(tmp_path / "alone", **SECURE).params_sha256


def test_a_member_that_the_server_makes_up_is_refused_by_all(
    kits: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server signs as a hospital of its own with its own certificate, which the root issued too."""
    loop = Loopback(tmp_path / "sites")
    for name, site in loop.sites.items():
        loop.sites[name] = Site(name, loop.rules[name], site._state, identity(kits, name))
    forged = with_kit_of(kits, tmp_path / "startup", "localhost")
    loop.sites["south"] = Site("south", loop.rules["south"], tmp_path / "sites" / "forged", forged)

    with pytest.raises(TooFewClients, match="no secure sum"):
        conducted(loop, tmp_path / "run", **SECURE, retries=0)
    said = "the certificate of 'south' is not of that name"
    assert sum(said in record.getMessage() for record in caplog.records) == 3  # one in its own answer
