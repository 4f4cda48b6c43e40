"""Units: what systemd is told, whatever the path, the port and the key."""

from dataclasses import replace
from pathlib import Path

from pytest import importorskip

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
