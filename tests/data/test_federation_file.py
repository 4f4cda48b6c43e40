"""federation.yaml: read with every mistake named, written with comments."""

from pathlib import Path

from pytest import MonkeyPatch, mark, raises

from data.test_sources import centre, of
from wardround.data.federation_file import (
    ClientPartition,
    PartitionSettings,
    PrepareSettings,
    SplitSettings,
    load,
    write,
)
from wardround.data.sources import list_cases
from wardround.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "federation.yaml").write_text(text, encoding="utf-8")
    return tmp_path / "federation.yaml"


# load


@mark.parametrize(
    ("text", "reason"),
    [
        ("sources: [{path: a}]\nlables: {x: [1]}\n", "lables is not a setting. Did you mean 'labels'"),
        (
            "sources: [{pth: a}]\n",
            "sources.0.path is missing|sources.0.pth is not a setting. Did you mean 'path'",
        ),
        ("sources: [{path: a, readr: msd}]\n", "sources.0.readr is not a setting. Did you mean 'reader'"),
        (
            "sources: [{path: a}]\nprepare: {sise: [1]}\n",
            "prepare.sise is not a setting. Did you mean 'size'",
        ),
        ("sources: [{path: a}]\nsplits: {by: random}\n", "splits.by is 'random'; it must be"),
        ("sources: []\n", "sources is too short"),
        ("version: 1\n", "sources is missing"),
        ("- a\n", "found a list"),
        ("sources: [{path: a}\n", "line"),
        ("sources: [{path: a}]\nlabels: {a: [1], b: [1]}\n", "value 1 is both 'a' and 'b'"),
        ("sources: [{path: a}]\nlabels: {a: [-1]}\n", "0 or more"),
        (
            "sources: [{path: a}]\nlabels: {background: [0], core: [1]}\n",
            "background is not a class.*Leave it out",
        ),
        (
            "sources: [{path: a}]\nlabels: {core: [1], BG: [255]}\n",
            "labels.BG is .255.; background is not a class",
        ),
        (
            "sources: [{path: a}]\nlabels: {tumour: one}\n",
            r"labels.tumour is 'one'; it must be a list .* \[1\]",
        ),
        ("sources: [{path: a}]\nlabels: {1: tumour}\n", "labels: 1 is not a name; put the name first"),
        ("sources: [{path: a}]\nregions: {1: whole}\n", "regions: 1 is not a name; put the name first"),
        ("sources: [{path: a}]\nprepare: {spacing: [.nan, 1, 1]}\n", "prepare.spacing is .*finite"),
        ("sources: [{path: a}]\nprepare: {spacing: [1, .inf, 1]}\n", "prepare.spacing is .*finite"),
        ("sources: [{path: a}]\nprepare: {spacing: [1, 0, 1]}\n", "prepare.spacing is .*above 0"),
        ("sources: [{path: a}]\nprepare: {size: [0, 4]}\n", "prepare.size is"),
        ("sources: [{path: a}]\nlabels: {a: [5]}\nregions: {a: [5]}\n", "class numbers from 1 to 1"),
        ("sources: [{path: a, labels: {x: 1}}]\n", "sources.0.labels names 'x', which labels does not"),
        ("sources: [{path: a, labels: {}}]\nlabels: {x: 1}\n", "sources.0.labels is empty"),
        (
            "sources: [{path: a, labels: {x: 1, y: 1}}]\nlabels: {x: 1, y: 2}\n",
            "sources.0.labels: value 1 is both 'x' and 'y'",
        ),
        ("sources: [{path: a}]\nannotates: {n: {x: 1}}\n", r"annotates.n is .*a list such as .* \[name\]"),
        ("sources: [{path: a}]\nlabels: {x: 9}\nignore: 9\n", "ignore: value 9 is 'x'"),
        ("sources: [{path: a, labels: {x: 9}}]\nlabels: {x: 1}\nignore: 9\n", "ignore: value 9 is 'x'"),
        ("sources: [{path: a}]\nignore: 9\nbackground: 9\n", "ignore: value 9 is 'background'"),
        ("sources: [{path: a}]\nclients: [n]\nheld_out: [n]\n", "in clients and in held_out"),
    ],
)
def test_a_mistake_is_named_with_its_key(tmp_path: Path, text: str, reason: str) -> None:
    with raises(ConfigError, match=reason) as caught:
        load(written(tmp_path, text))
    assert "federation.yaml" in str(caught.value)


def test_a_number_alone_is_a_list_of_one(tmp_path: Path) -> None:
    file = load(written(tmp_path, "sources: [{path: a}]\nlabels: {tumour: 1}\nregions: {tumour: 1}\n"))
    assert file.labels == {"tumour": (1,)} and file.regions == {"tumour": (1,)}


def test_a_class_of_value_0_is_allowed_where_another_value_is_background(tmp_path: Path) -> None:
    file = load(written(tmp_path, "sources: [{path: a}]\nlabels: {rim: [128], cup: [0]}\n"))
    assert file.labels == {"rim": (128,), "cup": (0,)}


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = "sources: [{path: ~/scans}]\ncache: ~/prepared\nsplits: {by: file, file: ~/splits.json}\n"
    file = load(written(tmp_path, text))
    assert file.cache == tmp_path / "home/prepared" and file.sources[0].path == tmp_path / "home/scans"
    assert file.splits.file == tmp_path / "home/splits.json"
    unknown = load(written(tmp_path, "sources: [{path: a}]\ncache: ~no such user/x\n"))
    assert unknown.cache == Path("~no such user/x")


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with raises(ConfigError, match="wardround data init"):
        load(tmp_path / "federation.yaml")


# write


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = of(
        "data/a b",
        clients=("1e3", "no", "Süd", "0x1F"),
        held_out=("1.5",),
        channels=("t1", "t2"),
        labels={"1": (1, 4), "core": (2,)},
        regions={"whole": (1, 2)},
        splits=SplitSettings(by="kfold", fold=2, file=Path("splits.json")),
        partition=PartitionSettings(kind="dirichlet", alpha=0.1),
        prepare=PrepareSettings(
            spacing=(1.0, 1.0, 3.5),
            orientation=None,
            normalise="ct",
            window=(40.0, 400.0),
            intensities=((-900.5, 300.0, 40.0, 120.25), None),
        ),
        cache=Path("cache"),
        about={"licence": "CC BY 4.0"},
    )
    path = tmp_path / "deep" / "federation.yaml"
    write(file, path, notes=["A name with\na break: {x"])
    assert load(path) == file
    text = path.read_text(encoding="utf-8")
    assert "# A name with\n# a break" in text and "# What is measured" in text and "Süd" in text


def test_a_short_file_shows_what_people_look_for(tmp_path: Path) -> None:
    write(of("x"), tmp_path / "f.yaml")
    text = (tmp_path / "f.yaml").read_text()
    assert (
        "by: column" in text
        and "kind: natural" in text
        and "normalise: zscore" in text
        and "held_out" not in text
    )


def test_edits_are_not_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path, "mine")
    with raises(ConfigError, match="already exists"):
        write(of("x"), path)
    assert path.read_text() == "mine"
    write(of("x"), path, overwrite=True)
    assert load(path) == of("x")


def test_paths_are_relative_where_that_is_sensible(tmp_path: Path) -> None:
    centre(tmp_path / "data" / "north", "a")
    path = tmp_path / "run" / "federation.yaml"
    write(of(str(tmp_path / "data"), "/usr"), path)
    assert [str(source.path) for source in load(path).sources] == ["../data", "/usr"]
    assert len(list_cases(of("../data"), path.parent).entries) == 1


def test_a_folder_reached_through_a_link_is_still_found(tmp_path: Path) -> None:
    centre(tmp_path / "a" / "real" / "north", "a")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "real")
    write(of(str(tmp_path / "link")), tmp_path / "f.yaml")
    assert list_cases(load(tmp_path / "f.yaml"), tmp_path).clients == ["north"]


@mark.parametrize(
    ("partition", "sentence"),
    [
        ("{kind: natural}", None),
        (
            "{kind: quantity, skew: 2}",
            "Clients are an artificial partition of a, b by size (power law, skew 2)",
        ),
        (
            "{kind: dirichlet, alpha: 0.1, by: class}",
            "of a, b by class (dirichlet, alpha 0.1), not hospitals.",
        ),
        ("{kind: feature, shift: contrast}", "by changed images (feature, contrast, strength 0.5)"),
        ("{kind: column, column: scanner}", "Clients are a partition of a, b by column 'scanner'."),
    ],
)
def test_clients_that_were_made_are_described(partition: str, sentence: str | None, tmp_path: Path) -> None:
    text = f"sources: [{{path: data/a}}, {{path: data/b}}]\npartition: {partition}\n"
    found = ClientPartition.find(load(written(tmp_path, text)))

    assert found is None if sentence is None else found is not None and sentence in found.sentence
