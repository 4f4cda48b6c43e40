"""Units: what systemd is told, whatever the path, the port and the key."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from pytest import importorskip, mark

importorskip("cryptography")

from wardround.deploy.kits.kit import read_kit
from wardround.deploy.kits.private_key import encode_key, make_key
from wardround.deploy.unit import render_unit, write_unit


def test_a_hospital_joins_and_the_organiser_serves(kits: Path) -> None:
    north, organiser = read_kit(kits / "north"), read_kit(kits / "organiser")
    text = render_unit(north, "wards", ["/opt/w/bin/wardround"])
    assert f"ExecStart=/opt/w/bin/wardround join {north.folder}\n" in text and "User=wards\n" in text
    assert "RestartPreventExitStatus=2\n" in text and "Capabilities" not in text and "Credential" not in text
    text = render_unit(replace(organiser, port=443, folder=Path("/srv/a b")), "wards", ["wardround"])
    assert 'ExecStart=wardround server "/srv/a b"\n' in text
    assert "AmbientCapabilities=CAP_NET_BIND_SERVICE\n" in text


def test_a_passphrase_is_handed_over_as_a_credential(mine: Path) -> None:
    kit = read_kit(mine / "north")
    kit.own_key.write_bytes(encode_key(make_key(), b"correct horse"))
    text = write_unit(kit).read_text()
    assert "LoadCredential=passphrase:/etc/wardround/north.passphrase\n" in text
    assert "Environment=WARDROUND_PASSPHRASE_FILE=%d/passphrase\n" in text and "horse" not in text


@mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_with_a_unit(kits: Path, tmp_path: Path) -> None:
    for name in ("north", "organiser"):
        kit = replace(read_kit(kits / name), folder=tmp_path / "a b", port=443)
        path = tmp_path / f"wardround-{name}.service"
        path.write_text(render_unit(kit, "root", [sys.executable]), encoding="utf-8")
        done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
        assert (done.returncode, path.name in done.stderr) == (0, False), done.stderr
