"""Lists of cases whose columns have names of their own."""

from pathlib import Path

from pytest import raises

from wardround.data.listing import Listing
from wardround.data.readers import table
from wardround.errors import ConfigError, DataError


def said(found: Listing) -> str:
    return " ".join(found.notes)


def test_columns_of_other_names_are_guessed_by_their_files_or_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("image,delineation\nx.png,y.png\n")
    found = table.read(tmp_path / "a.csv")
    assert found.entries[0].label == tmp_path / "y.png"
    assert "label from 'delineation' (a guess); no column for patient" in said(found)
    (tmp_path / "b.csv").write_text("foto,drawn,age\nx.png,y.png,4\n")
    with raises(DataError, match="Files are in foto, drawn. Say .* --column image=foto --column label=drawn"):
        table.read(tmp_path / "b.csv")
    found = table.read(tmp_path / "b.csv", None, {"image": "Foto", "mask": "drawn", "subject": "age"})
    assert found.entries[0].images == (tmp_path / "x.png",) and found.entries[0].group == "4"
    assert found.entries[0].label == tmp_path / "y.png" and not found.notes
    (tmp_path / "c.csv").write_text("t1,flair,contour\na.nii,b.nii,c.nii\n")
    found = table.read(tmp_path / "c.csv")
    assert found.channels == ("t1", "flair") and "label from 'contour' (a guess)" in said(found)
    (tmp_path / "d.csv").write_text("foto,age\nx.png,4\n")
    assert "d.csv has no column of label files. Name one of: age" in said(table.read(tmp_path / "d.csv"))


def test_columns_that_are_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("foto,drawn\nx.png,y.png\n")
    with raises(ConfigError, match="no column 'photo'. Did you mean 'foto'"):
        table.read(tmp_path / "a.csv", None, {"image": "photo"})
    with raises(ConfigError, match="no use for a column of 'colour'; name one of image, label"):
        table.read(tmp_path / "a.csv", None, {"colour": "foto"})


def test_a_list_that_merely_lies_there_is_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "north").mkdir()
    (tmp_path / "north" / "a.csv").write_text("foto,mask\nx.png,y.png\n")
    assert table.recognise(tmp_path / "north") is None and table.recognise(tmp_path / "north" / "a.csv")
