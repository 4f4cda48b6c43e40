"""Sources: each read by its reader, all joined, clients chosen; what does not agree is refused."""

import json
from pathlib import Path
from typing import Any

from pytest import mark, raises

from wardround.data.federation_file import FederationFile, Source
from wardround.data.sources import list_cases, read_source
from wardround.errors import ConfigError, DataError


def centre(root: Path, *stems: str) -> None:
    for part in ("images", "labels"):
        (root / part).mkdir(parents=True, exist_ok=True)
        for stem in stems:
            (root / part / f"{stem}.png").write_bytes(b"")


def of(*paths: str, **settings: Any) -> FederationFile:
    return FederationFile(sources=tuple(Source(path=Path(path)) for path in paths), **settings)


# One source


def test_an_unknown_reader_is_corrected(tmp_path: Path) -> None:
    with raises(ConfigError, match="Did you mean 'centres'"):
        read_source(Source(path=tmp_path, reader="centers"), Path())


def test_a_folder_without_cases_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    with raises(DataError, match="has no cases"):
        read_source(Source(path=tmp_path), Path())


def test_centres_under_one_name_keep_equal_stems_apart(tmp_path: Path) -> None:
    centre(tmp_path / "north", "a")
    centre(tmp_path / "south", "a")
    found = read_source(Source(path=tmp_path, client="both"), Path())
    assert [(entry.client, entry.name) for entry in found.entries] == [
        ("both", "north_a"),
        ("both", "south_a"),
    ]


# What masks and colours of a source mean


def organs(root: Path, *names: str) -> Path:
    centre(root, *(f"a_{name}" for name in names))
    for path in (root / "images").iterdir():
        path.unlink()
    (root / "images" / "a.png").write_bytes(b"")
    return root


def test_masks_have_the_values_of_their_source_whatever_lies_beside_them_later(tmp_path: Path) -> None:
    source = Source(path=organs(tmp_path / "north", "liver", "spleen"), masks={"spleen": 1, "liver": 2})
    entry = read_source(source, Path()).entries[0]
    assert list(entry.masks) == ["spleen", "liver"] and entry.coding is not None
    assert entry.coding.masks == {"spleen": 1, "liver": 2} and entry.label == entry.masks["spleen"]
    organs(tmp_path / "north", "kidney")
    found = read_source(source, Path())
    assert found.entries[0].coding == entry.coding and list(found.entries[0].masks) == ["spleen", "liver"]
    assert "masks that its source does not name are not used: kidney" in " ".join(found.notes)


def test_labels_of_masks_without_values_are_refused_since_they_could_be_swapped(tmp_path: Path) -> None:
    organs(tmp_path / "north", "liver", "spleen")
    assert list_cases(of("north"), tmp_path).labels == {"liver": (1,), "spleen": (2,)}
    with raises(
        ConfigError, match="value each has, so that labels can name it: masks: {liver: 1, spleen: 2}"
    ):
        list_cases(of("north", labels={"spleen": (1,), "liver": (2,)}), tmp_path)


def test_masks_that_are_not_there_are_refused_or_noted(tmp_path: Path) -> None:
    organs(tmp_path / "north", "liver", "spleen")
    found = read_source(Source(path=tmp_path / "north", masks={"liver": 1, "spleen": 2, "lung": 3}), Path())
    assert "no mask is called 'lung', which masks names" in " ".join(found.notes)
    centre(tmp_path / "south", "a")
    with raises(ConfigError, match="has no masks of single classes"):
        read_source(Source(path=tmp_path / "south", masks={"liver": 1}), Path())


@mark.parametrize(
    ("settings", "reason"),
    [
        ({"colours": {"red": 1}}, "'red' is not a colour; write '#ff0000', in quotes"),
        ({"colours": {"#ff0000": 256}}, "256"),
        ({"masks": {"liver": -1}}, "-1"),
        ({"overlap": "first"}, "refuse.*later"),
    ],
)
def test_a_wrong_map_is_named(settings: dict[str, Any], reason: str) -> None:
    with raises(ConfigError, match=reason):
        FederationFile.read({"sources": [{"path": "north", **settings}]})


def test_colours_are_read_in_either_case() -> None:
    file = FederationFile.read({"sources": [{"path": "north", "colours": {"#FF00aa": 1}}]})
    assert file.sources[0].colours == {"#ff00aa": 1}


# All cases of a file


def test_sources_are_joined_and_clients_chosen(tmp_path: Path) -> None:
    for name in ("north", "south", "west"):
        centre(tmp_path / "one" / name, "a", "b")
    centre(tmp_path / "two" / "east", "a")
    file = of("one", "two", clients=("north", "east"), held_out=("west",))
    found = list_cases(file, tmp_path)
    assert found.clients == ["east", "north", "west"]
    assert {entry.split for entry in found.of("west")} == {"test"}
    assert list_cases(of("one", "two"), tmp_path).clients == ["east", "north", "south", "west"]
    with raises(ConfigError, match="'noth', which has no cases. Did you mean 'north'"):
        list_cases(of("one", clients=("noth",)), tmp_path)


def test_clients_without_training_cases_are_left_out_with_a_note(tmp_path: Path) -> None:
    centre(tmp_path / "north", "a")
    centre(tmp_path / "south", "b")
    (tmp_path / "index.csv").write_text("centre,stem,split\nnorth,a,train\nsouth,b,test\n")
    found = list_cases(of("."), tmp_path)
    assert found.clients == ["north"] and "left out: south" in " ".join(found.notes)
    assert list_cases(of(".", held_out=("south",)), tmp_path).clients == ["north", "south"]
    (tmp_path / "index.csv").write_text("centre,stem,split\nnorth,a,val\nsouth,b,test\n")
    with raises(DataError, match="No client has training cases"):
        list_cases(of("."), tmp_path)


def test_one_client_in_two_sources_is_joined_and_the_same_case_refused(tmp_path: Path) -> None:
    centre(tmp_path / "one" / "north", "a")
    centre(tmp_path / "two" / "north", "b")
    found = list_cases(of("one", "two"), tmp_path)
    assert len(found.of("north")) == 2 and "more than one source" in " ".join(found.notes)
    centre(tmp_path / "two" / "north", "a")
    with raises(DataError, match="client 'north', case 'a' is there twice"):
        list_cases(of("one", "two"), tmp_path)


@mark.parametrize("name", ["pooled", "proxy"])
def test_names_wardround_uses_itself_are_refused(tmp_path: Path, name: str) -> None:
    centre(tmp_path / name, "a")
    with raises(DataError, match="cannot be called"):
        list_cases(of("."), tmp_path)


def test_names_that_differ_in_capitals_are_refused(tmp_path: Path) -> None:
    centre(tmp_path / "one" / "north", "a")
    centre(tmp_path / "two" / "North", "a")
    with raises(DataError, match="capitals"):
        list_cases(of("one", "two"), tmp_path)


def raw(root: Path, channels: str, label: str) -> None:
    (root / "imagesTr").mkdir(parents=True)
    (root / "labelsTr").mkdir()
    names = ", ".join(f'"{n}": "{c}"' for n, c in enumerate(channels))
    (root / "dataset.json").write_text(
        f'{{"channel_names": {{{names}}}, "labels": {{"background": 0, "{label}": 1}}}}'
    )
    for n in range(len(channels)):
        (root / "imagesTr" / f"x_{n:04d}.nii.gz").write_bytes(b"")
    (root / "labelsTr" / "x.nii.gz").write_bytes(b"")


def test_channels_in_another_order_are_brought_into_one(tmp_path: Path) -> None:
    raw(tmp_path / "A", "ab", "tumour")
    raw(tmp_path / "B", "ba", "tumour")
    found = list_cases(of("A", "B"), tmp_path)
    assert found.channels == ("a", "b") and [p.name for p in found.of("B")[0].images] == [
        "x_0001.nii.gz",
        "x_0000.nii.gz",
    ]
    assert found.labels == {"tumour": (1,)} and "order a, b" in " ".join(found.notes)


def test_a_label_value_of_two_meanings_is_refused_until_the_file_decides(tmp_path: Path) -> None:
    raw(tmp_path / "A", "a", "tumour")
    raw(tmp_path / "B", "a", "oedema")
    with raises(DataError, match="label value 1 is 'tumour' at client 'A' and 'oedema' at client 'B'"):
        list_cases(of("A", "B"), tmp_path)
    found = list_cases(of("A", "B", labels={"tumour": (1,)}), tmp_path)
    assert found.labels == {"tumour": (1,)} and "calls label value 1 'oedema'" in " ".join(found.notes)


def test_a_class_whose_values_are_another_one_in_the_federation_is_refused(tmp_path: Path) -> None:
    dataset(tmp_path / "north", {"background": 0, "kidney": 1, "liver": 2})
    dataset(tmp_path / "south", {"background": 0, "liver": 1, "kidney": 2})
    organs(tmp_path / "west", "kidney", "liver")
    said = {"kidney": (1,), "liver": (2,)}
    with raises(ConfigError, match=r"'south' calls label value 1 'liver', but labels gives it to 'kidney'"):
        list_cases(of("north", "south", labels=said), tmp_path)
    west = Source(path=Path("west"), masks={"kidney": 2, "liver": 1})
    with raises(ConfigError, match=r"'west' calls label value 2 'kidney'.*labels: {kidney: \[2\], liver"):
        list_cases(FederationFile(sources=(west,), labels=said), tmp_path)
    mapped = Source(path=Path("south"), labels={"kidney": (2,), "liver": (1,)})
    assert list_cases(FederationFile(sources=(mapped,), labels=said), tmp_path).entries[0].labels == {
        "kidney": (2,),
        "liver": (1,),
    }


def test_annotates_may_name_clients_that_are_left_out_and_no_others(tmp_path: Path) -> None:
    centre(tmp_path / "north", "a")
    centre(tmp_path / "south", "b")
    told = {"north": ("x",), "south": ("x",)}
    assert list_cases(of("north", "south", clients=("north",), annotates=told), tmp_path).clients == ["north"]
    with raises(ConfigError, match="annotates names client 'nrth', which does not exist. Did you mean"):
        list_cases(of("north", "south", annotates={"nrth": ("x",)}), tmp_path)


# Regions of several sources


def dataset(root: Path, labels: dict[str, Any]) -> None:
    for part in ("imagesTr/a_0000", "labelsTr/a"):
        path = root / f"{part}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    facts = {"channel_names": {"0": "T1"}, "labels": labels, "file_ending": ".nii.gz"}
    (root / "dataset.json").write_text(json.dumps({**facts, "regions_class_order": [1, 2]}))


def test_hospitals_in_nnunet_folders_share_regions_and_ignored_values(tmp_path: Path) -> None:
    dataset(tmp_path / "north", {"background": 0, "whole": [1, 2], "core": [2]})
    dataset(tmp_path / "south", {"background": 0, "whole": [2, 1], "core": 2, "ignore": 3})
    found = list_cases(of("north", "south"), tmp_path)
    assert found.clients == ["north", "south"] and found.ignore == (3,)
    assert found.regions == {"whole": (1, 2), "core": (2,)}
    renumbered = list_cases(of("north", "south", labels={"core": (2,), "rim": (1,)}), tmp_path)
    assert renumbered.regions == {"whole": (1, 2), "core": (1,)}


def test_hospitals_with_different_regions_are_refused(tmp_path: Path) -> None:
    dataset(tmp_path / "north", {"background": 0, "whole": [1, 2, 3], "core": [2, 3]})
    dataset(tmp_path / "south", {"background": 0, "whole": [1, 2, 3], "core": [1, 2]})
    with raises(
        DataError, match="'north' and 'south' have different regions: whole, core; whole, core. Make"
    ):
        list_cases(of("north", "south"), tmp_path)
