"""containers/: versions are the project's, nothing runs as root, scans are read-only, hospitals open no port."""

import re
import tomllib
from pathlib import Path
from typing import Any

import typer
import yaml
from pytest import mark

from wardround.cli import app

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "containers"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
APPTAINER = (FOLDER / "wardround.def").read_text(encoding="utf-8")
SERVICES = {"organiser": "server", "hospital": "join"}


def service(name: str) -> dict[str, Any]:
    (found,) = yaml.safe_load((FOLDER / f"compose.{name}.yaml").read_text(encoding="utf-8"))[
        "services"
    ].values()
    return dict(found)


def test_every_file_names_the_version_of_the_project_and_no_other() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FOLDER.iterdir()]
    found = {
        version
        for text in texts
        for version in re.findall(r"wardround:(\d[\w.]*)|image\.version[ =](\S+)", text)
    }

    assert {one for pair in found for one in pair if one} == {PROJECT["version"]}


def test_both_images_have_one_python_that_the_project_supports() -> None:
    docker = set(re.findall(r"python:(\d\.\d+)-", DOCKERFILE))
    apptainer = set(re.findall(r"From: python:(\d\.\d+)-", APPTAINER))

    assert docker == apptainer and len(docker) == 1
    assert f"Programming Language :: Python :: {docker.pop()}" in PROJECT["classifiers"]


def test_versions_come_from_constraints_and_extras_exist() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
        if "==" in line
    )
    extras = set(re.findall(r"EXTRAS=(\S+)", DOCKERFILE + APPTAINER))

    assert (
        "PIP_CONSTRAINT=/source/constraints.txt" in DOCKERFILE
        and "PIP_CONSTRAINT=/source/constraints.txt" in APPTAINER
    )
    assert len(extras) == 1 and set(extras.pop().split(",")) <= set(PROJECT["optional-dependencies"])
    assert {"torch", "grpcio", "hatchling"} <= pins.keys()
    assert not re.search(r"pip install [^\n]*==", DOCKERFILE + APPTAINER)


def test_files_that_images_are_built_from_exist_and_are_let_through() -> None:
    copied = [
        word
        for line in re.findall(r"^COPY (?!--)(.+)$", DOCKERFILE, re.MULTILINE)
        for word in line.split()[:-1]
    ]
    placed = re.findall(r"^    (\S+) /source/", APPTAINER, re.MULTILINE)
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()

    assert sorted(copied) == sorted(placed)
    assert all((ROOT / name).exists() and f"!{name}" in ignored for name in copied)


def test_the_image_runs_wardround_as_a_user_who_is_not_root() -> None:
    last = DOCKERFILE.rpartition("\nFROM ")[2]

    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert 'ENTRYPOINT ["wardround"]' in last
    assert "USER root" not in last


@mark.parametrize("name", SERVICES)
def test_services_start_existing_commands_with_few_rights_and_secrets_as_files(name: str) -> None:
    found = service(name)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]

    assert found["command"][0] == SERVICES[name] and SERVICES[name] in commands
    assert (
        found["read_only"] and found["cap_drop"] == ["ALL"] and found["user"].startswith("${WARDROUND_USER:?")
    )
    assert found["security_opt"] == ["no-new-privileges:true"] and "privileged" not in found
    assert found["environment"] == {"WARDROUND_PASSPHRASE_FILE": "/run/secrets/passphrase"}
    assert found["secrets"] == ["passphrase"]


def test_a_hospital_opens_no_port_and_its_scans_are_read_only() -> None:
    found = service("hospital")

    assert "ports" not in found and "network_mode" not in found
    (scans,) = [volume for volume in found["volumes"] if "SCANS" in volume["source"]]
    assert scans["read_only"] is True and scans["target"] == "${WARDROUND_SCANS}"


def test_the_server_listens_on_this_machine_alone_until_told_otherwise() -> None:
    found = service("organiser")

    assert [port.split(":")[0] + port.split(":")[1] for port in found["ports"]] == [
        "${WARDROUND_LISTEN-127.0.0.1}"
    ]
    assert found["healthcheck"]["test"][:3] == ["CMD", "wardround", "status"]
