"""From folders to a federation through the command line: init, check, prepare, split, partition, fingerprint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import typer
import yaml
from helpers import call, settings
from PIL import Image
from pytest import CaptureFixture, MonkeyPatch, fixture, mark
from rich.markup import render

from wardround.cli import app
from wardround.data import federation_file
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.phantom.files import write


@fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """Two synthetic hospitals as PNG folders, and the current directory beside them."""
    made = PhantomSettings(hospitals=2, size=32, cases=10)
    write(made, tmp_path / "data", "png", seed=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_folders_to_a_table_in_two_commands(
    folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, err = call(monkeypatch, capsys, "data", "init", "data")
    assert code == 0, err
    assert "Found 20 cases of 2 clients" in out and (folder / "federation.yaml").exists()

    settings = {"rounds": 1, "model": {"base_filters": 2, "levels": 2}, "evaluate": {"metrics": ["dice"]}}
    (folder / "run.yaml").write_text(yaml.safe_dump({**settings, "data": {"federation": "federation.yaml"}}))
    code, out, err = call(monkeypatch, capsys, "train", "run.yaml", "--quiet")
    assert code == 0, err
    assert "| north |" in out and "| east |" in out


def test_every_step_by_itself(folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    def done(*arguments: str) -> str:
        code, out, err = call(monkeypatch, capsys, *arguments)
        assert code == 0, err
        return out

    done("data", "init", "data", "--quiet")
    assert "20 of 20 cases are usable" in done("data", "check", "federation.yaml", "--strict")
    prepared = json.loads(done("data", "prepare", "federation.yaml", "--json"))
    assert prepared["prepared"] == {"east": 10, "north": 10}
    done("data", "split", "federation.yaml", "-o", "splits.json", "--set", "by=ratios")
    assert set(json.loads((folder / "splits.json").read_text())) >= {"north", "east"}
    rows = json.loads(done("data", "partition", "federation.yaml", "--json", "--picture", "who.png"))
    assert {row["client"] for row in rows} >= {"north", "east"}
    assert (folder / "who.png").stat().st_size > 1000
    told = done("data", "fingerprint", "federation.yaml", "-o", "told.json", "--picture", "told.png")
    assert "Wrote" in told and json.loads((folder / "told.json").read_text())


@mark.parametrize(
    ("arguments", "sentence"),
    [
        (["data", "init", "nowhere"], "nowhere does not exist"),
        (["data", "check", "none.yaml"], "none.yaml"),
        (["data", "init", "data", "data"], "given twice"),
        (["datasets", "show", "polypp"], "Did you mean 'polyp'?"),
        (["data", "split", "federation.yaml", "--set", "folds=1"], "folds"),
        (["data", "prepare", "federation.yaml", "--set", "prepare.sizes=[8,8]"], "Did you mean 'size'?"),
        (["data", "partition", "federation.yaml", "--set", "partition.kind=iid"], "write it there"),
        (["data", "init", "data", "-o", "/proc/f.yaml"], "/proc/f.yaml cannot be written"),
        (["data", "split", "federation.yaml", "-o", "/proc/s.json"], "/proc/s.json cannot be written"),
        (["data", "partition", "federation.yaml", "--picture", "/proc/p.png"], "/proc/p.png cannot be"),
        (["data", "fingerprint", "federation.yaml", "--picture", "/proc/p.png"], "/proc/p.png cannot be"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str],
    sentence: str,
    folder: Path,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
) -> None:
    call(monkeypatch, capsys, "data", "init", "data", "--quiet")
    code, _, err = call(monkeypatch, capsys, *arguments)

    assert code == 2 and sentence in err and "Traceback" not in err


def test_settings_may_be_written_as_for_training(
    folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    call(monkeypatch, capsys, "data", "init", "data", "--quiet")
    size = ["--set", "data.prepare.size=[16, 16]"]
    assert call(monkeypatch, capsys, "data", "prepare", "federation.yaml", *size)[0] == 0
    kept = [json.loads(path.read_text()) for path in folder.glob(".wardround-cache/*/settings.json")]
    assert [settings["prepare"]["size"] for settings in kept] == [[16, 16]]
    by = ["--set", "splits.by=kfold", "--set", "data.splits.fold=1"]
    assert call(monkeypatch, capsys, "data", "split", "federation.yaml", *by)[0] == 0


def test_the_next_command_can_be_copied(
    folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    _, out, _ = call(monkeypatch, capsys, "data", "init", "data", "-o", "my file.yaml")
    assert "wardround data check 'my file.yaml'" in out


def test_a_fingerprint_leaves_out_what_cannot_be_read_and_gives_its_verdict_once(
    folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    call(monkeypatch, capsys, "data", "init", "data", "--quiet")
    next((folder / "data").glob("*/images/*")).write_bytes(b"broken")
    code, out, err = call(monkeypatch, capsys, "data", "fingerprint", "federation.yaml")
    assert code == 0, err
    assert "1 case is left out" in out and out.count("These are summary numbers") == 1


def test_a_fingerprint_of_nothing_usable_says_why(
    folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    call(monkeypatch, capsys, "data", "init", "data", "--quiet")
    for path in (folder / "data").glob("*/images/*"):
        path.write_bytes(b"broken")
    code, _, err = call(monkeypatch, capsys, "data", "fingerprint", "federation.yaml")
    assert code == 2 and "no case is usable" in err and "cannot be read" in err


def test_published_data_sets_are_listed_and_shown(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, "datasets", "--json")
    assert code == 0 and len(json.loads(out)) >= 15
    code, out, _ = call(monkeypatch, capsys, "datasets", "show", "polyp")
    assert code == 0 and "Kvasir-SEG" in out


# Help


@mark.parametrize("command", [("data", "import-dicom"), ("data",)])
def test_the_help_says_what_to_install(
    command: tuple[str, ...], monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, *command, "--help")
    assert code == 0 and "wardround[dicom]" in out


def test_no_help_loses_words_in_brackets() -> None:
    lost = {where: text for where, text in helps(typer.main.get_command(app)) if eaten(text)}
    assert lost == {}


def helps(command: Any, where: str = "wardround") -> Iterator[tuple[str, str]]:
    """Every help text of a command, its options and the commands below it."""
    yield where, command.help or ""
    for option in command.params:
        yield f"{where} {option.name}", getattr(option, "help", None) or ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, f"{where} {name}")


def eaten(text: str) -> bool:
    """Whether the console takes a part of a text for markup."""
    return render(text).plain != text.replace("\\[", "[")


def test_check_exits_2_where_no_case_is_usable(
    folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    call(monkeypatch, capsys, "data", "init", "data", "--quiet")
    text = (folder / "federation.yaml").read_text()
    assert call(monkeypatch, capsys, "data", "check", "federation.yaml")[0] == 0
    wrong = yaml.safe_load(text) | {"labels": {"lesion": [99]}, "regions": {"lesion": [1]}}
    (folder / "federation.yaml").write_text(yaml.safe_dump(wrong))
    code, out, _ = call(monkeypatch, capsys, "data", "check", "federation.yaml")
    assert code == 2 and "0 of 20 cases are usable" in " ".join(out.split())


def test_init_and_train_say_what_the_check_finds_about_labels(
    folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    for label in sorted((folder / "data").glob("*/labels/*.png"))[:10]:
        values = np.asarray(Image.open(label))
        Image.fromarray((values > 0).astype(np.uint8) * 3).save(label)
    code, out, err = call(monkeypatch, capsys, "train", "data", "--budget", "2")
    assert code == 2 and "! warning: client" in err and "has no case with class" in err
    assert "labels_differ: true in federation.yaml" in " ".join(err.split())
    code, out, _ = call(monkeypatch, capsys, "data", "init", "data", "-o", "other.yaml")
    assert code == 0 and "- warning: client" in out and "has no case with class" in out
    code, _, err = call(monkeypatch, capsys, "train", "federation.yaml", "--budget", "2")
    assert code == 2 and "has no case with class" in err


def test_columns_of_a_list_are_named_by_options(
    folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    names = sorted(path.name for path in (folder / "data" / "north" / "images").iterdir())
    (folder / "data" / "north" / "labels").rename(folder / "data" / "north" / "b")  # a name that says nothing
    rows = [f"north/images/{name},north/b/{name},p{n // 2},a" for n, name in enumerate(names)]
    (folder / "data" / "list.csv").write_text("\n".join(["foto,drawn,mrn,where", *rows]))
    given = ("data", "init", "data/list.csv")
    code, _, err = call(monkeypatch, capsys, *given)
    assert code == 2 and "--column image=foto --column label=drawn" in " ".join(err.split())
    named = [f"--column={text}" for text in ("image=foto", "label=drawn", "patient=mrn", "client=where")]
    code, out, err = call(monkeypatch, capsys, *given, *named)
    assert code == 0, err
    assert "image from 'foto', label from 'drawn', patient from 'mrn', client from 'where'" in " ".join(
        out.split()
    )
    code, out, err = call(monkeypatch, capsys, "data", "check", "federation.yaml")
    assert code == 0 and "10 of 10 cases are usable" in out
    for wrong, reason in (("image", "write NEED=COLUMN"), ("image=photo", "no column 'photo'. Did you mean")):
        code, _, err = call(monkeypatch, capsys, *given, "--column", wrong, "-o", "other.yaml")
        assert code == 2 and reason in " ".join(err.split())
    code, _, err = call(
        monkeypatch, capsys, "data", "init", "data", "--column", "image=x", "-o", "other.yaml"
    )
    assert code == 2 and "Columns are those of a list" in err


def test_coloured_masks_go_from_init_to_a_trained_model(
    folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    colours = np.array([[255, 255, 255], [200, 0, 0]], dtype=np.uint8)
    for path in sorted((folder / "data").glob("*/labels/*.png")):
        with Image.open(path) as picture:
            label = np.array(picture)
        Image.fromarray(colours[(label > 0).astype(int)]).save(path)
    code, out, err = call(monkeypatch, capsys, "data", "init", "data")
    assert code == 0, err
    assert "#ffffff" in out and "is taken for background: a guess" in " ".join(out.split())
    settings = {"rounds": 1, "model": {"base_filters": 2, "levels": 2}, "evaluate": {"metrics": ["dice"]}}
    (folder / "run.yaml").write_text(yaml.safe_dump({**settings, "data": {"federation": "federation.yaml"}}))
    code, out, err = call(monkeypatch, capsys, "train", "run.yaml", "--quiet")
    assert code == 0 and "| north |" in out, err
    first = min((folder / "data" / "north" / "labels").iterdir())
    with Image.open(first) as picture:
        shown = np.array(picture)
    shown[0, :3] = (254, 255, 255)
    Image.fromarray(shown).save(first)
    code, out, _ = call(monkeypatch, capsys, "data", "check", "federation.yaml", "--strict")
    assert code == 2 and f"{first.name} has the colour #feffff in 3 pixels" in " ".join(out.split())


def test_stretched_pictures_are_announced_by_init_check_and_train(
    folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    for path in sorted((folder / "data" / "north").glob("*/*.png")):
        with Image.open(path) as picture:
            wide = picture.resize((48, 32), Image.Resampling.NEAREST)
        wide.save(path)
    _, out, _ = call(monkeypatch, capsys, "data", "init", "data")
    assert "Their shapes differ (32x32 to 32x48), so that some are stretched" in " ".join(out.split())
    _, out, _ = call(monkeypatch, capsys, "data", "check", "federation.yaml")
    assert "Images of different proportions (32x32 to 32x48) all become 32x32" in " ".join(out.split())
    assert "No findings" not in out and "shapes that will be stretched 1" in " ".join(out.split())
    settings = {"rounds": 1, "model": {"base_filters": 2, "levels": 2}, "evaluate": {"metrics": ["dice"]}}
    (folder / "run.yaml").write_text(yaml.safe_dump({**settings, "data": {"federation": "federation.yaml"}}))
    code, out, err = call(monkeypatch, capsys, "train", "run.yaml")
    assert code == 0 and "some are stretched, by up to 1.5" in " ".join((out + err).split())


def test_what_hospitals_seem_to_annotate_is_proposed_behind_a_hash(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    organs = [
        "--organs",
        "ventricles,lesion",
        "--annotates",
        "north=lesion",
        "--annotates",
        "east=ventricles",
    ]
    made = ["--hospitals", "2", "--format", "png", "--set", "cases=8", "--set", "size=32"]
    assert call(monkeypatch, capsys, "data", "phantom", "scans", *organs, *made)[0] == 0
    code, output, _ = call(monkeypatch, capsys, "data", "init", "scans")
    text = Path("federation.yaml").read_text()

    assert code == 0 and "Clients hold different classes" in output
    assert "# annotates:\n#   east: [class_1]\n#   north: [class_2]\n" in text
    assert federation_file.load(Path("federation.yaml")).annotates == {}
    confirmed = text.replace("# annotates:", "annotates:").replace("#   ", "  ")
    Path("federation.yaml").write_text(confirmed)
    assert federation_file.load(Path("federation.yaml")).annotates == {
        "east": ("class_1",),
        "north": ("class_2",),
    }


def test_a_hospital_and_its_classes_are_asked_for_in_one_word(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, _, error = call(monkeypatch, capsys, "data", "phantom", str(tmp_path / "x"), "--annotates", "north")
    assert code == 2 and "give HOSPITAL=CLASS,CLASS" in error
    wrong = ["--annotates", "nrth=lesion"]
    code, _, error = call(monkeypatch, capsys, "data", "phantom", str(tmp_path / "x"), *wrong)
    assert code == 2 and "Did you mean 'north'" in " ".join(error.split())


def test_hospitals_without_labels_are_proposed_behind_a_hash_and_train_once_confirmed(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = ["--hospitals", "2", "--format", "png", "--set", "unlabelled=[north]", "--set", "cases=6"]
    assert call(monkeypatch, capsys, "data", "phantom", "scans", "--set", "size=16", *made)[0] == 0
    code, said, _ = call(monkeypatch, capsys, "data", "init", "scans")
    assert code == 0 and "Images without a label: north (6 of 6). They are left out." in " ".join(
        said.split()
    )
    path = Path("federation.yaml")
    assert federation_file.load(path).unlabelled == () and "# unlabelled: [north]\n" in path.read_text()
    code, said, _ = call(monkeypatch, capsys, "data", "check", "federation.yaml")
    assert code == 0 and "name its client under unlabelled" in " ".join(said.split())

    path.write_text(path.read_text().replace("# unlabelled: [", "unlabelled: ["))
    code, said, _ = call(monkeypatch, capsys, "data", "check", "federation.yaml")
    assert code == 0 and "6 of 6 usable cases have no label and train without" in " ".join(said.split())
    config = {**settings(tmp_path / "run"), "data": {"federation": "federation.yaml"}}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    code, _, error = call(monkeypatch, capsys, "train", "run.yaml")
    assert code == 2 and "objective.name to mean_teacher or pseudo_labels" in " ".join(error.split())
    chosen = ["--set", "objective.name=mean_teacher", "--overwrite"]
    assert call(monkeypatch, capsys, "train", "run.yaml", *chosen)[0] == 0
