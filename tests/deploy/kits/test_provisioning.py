"""provision: what it refuses to renew or to overwrite."""

from pathlib import Path

import yaml
from helpers import call
from pytest import CaptureFixture, MonkeyPatch, importorskip, raises

importorskip("cryptography")

from wardround.deploy.kits import authority
from wardround.deploy.kits.project import Project
from wardround.deploy.kits.provisioning import provision
from wardround.errors import ConfigError


def test_nothing_is_renewed_without_the_authority_that_made_it(
    project: Project, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    file = tmp_path / "project.yaml"
    file.write_text(yaml.safe_dump(project.model_dump(mode="json")))

    code, _, err = call(
        monkeypatch, capsys, "provision", str(file), "-o", str(tmp_path / "new"), "--renew", "north"
    )

    assert code == 2 and "nothing can be renewed there" in err and not (tmp_path / "new").exists()


def test_a_file_cannot_be_the_folder_for_kits(project: Project, tmp_path: Path) -> None:
    (tmp_path / "kits").write_text("mine")

    with raises(ConfigError, match="cannot be the folder for the kits"):
        provision(project, tmp_path / "kits")
    with raises(ConfigError, match="Give another with -o"):
        provision(project, tmp_path / "kits" / "below")


def test_the_authority_knows_everybody_it_made_a_kit_for(
    mine: Path, project: Project, tmp_path: Path
) -> None:
    (mine / "organiser" / "keys" / "authority.crt").unlink()  # not needed to tell the fingerprint

    issuer, issued = authority.read_issued(mine)

    assert set(issued) == {"organiser", "north", "south"} and authority.format_fingerprint(issuer)
