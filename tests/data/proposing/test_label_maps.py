"""Label values that differ between hospitals: what `init` proposes, and that `train` does not pass over it."""

from pathlib import Path

import numpy as np
from PIL import Image
from pytest import mark, raises

from wardround.data.federation_file import load, write
from wardround.data.proposing.proposal import describe, propose
from wardround.data.serving.loading import RealData
from wardround.data.settings import DataSettings
from wardround.errors import DataError


def centre(folder: Path, value: int, image: str = "images/{}.png", label: str = "masks/{}.png") -> None:
    draw = np.random.default_rng(value)
    for n in range(4):
        for template, values in (
            (image, draw.integers(0, 255, (32, 32, 3))),
            (label, value * np.eye(32)),
        ):
            path = folder / template.format(f"c{n}")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.astype(np.uint8)).save(path)


def prepare(path: Path) -> None:
    RealData(path, DataSettings(federation=path)).prepare()


def test_values_that_may_mean_one_class_are_asked_about_and_not_trained(tmp_path: Path) -> None:
    for name, value in (("north", 1), ("south", 2)):
        centre(tmp_path / "data" / name, value)
    proposal = propose([tmp_path / "data"])
    assert "different label values (north 1, south 2). Each source has its own labels" in " ".join(
        describe(proposal)
    )
    assert [source.labels for source in proposal.file.sources] == [{"class_1": (1,), "class_2": (2,)}] * 2
    path = tmp_path / "federation.yaml"
    write(proposal.file, path)
    with raises(DataError, match="client 'north' has no case with class 'class_2'|'south' has no case"):
        prepare(path)
    text = path.read_text()
    path.write_text(text.replace("version: 1", "version: 1\nlabels_differ: true"))
    prepare(path)
    text = text.replace("      class_1: [1]\n      class_2: [2]\n", "      kidney: [1]\n", 1)
    text = text.replace("      class_1: [1]\n      class_2: [2]\n", "      kidney: [2]\n", 1)
    path.write_text(text.replace("  class_1: [1]\n  class_2: [2]\n", "  kidney: [1]\n"))
    assert [source.labels for source in load(path).sources] == [{"kidney": (1,)}, {"kidney": (2,)}]
    prepare(path)


@mark.parametrize(
    ("image", "label"),
    [("images/{}.png", "masks/{}.png"), ("{}.png", "{}_mask.png"), ("{0}/{0}.png", "{0}/gt.png")],
)
def test_masks_of_1_and_255_get_a_map_each_in_several_layouts(tmp_path: Path, image: str, label: str) -> None:
    for name, value in (("north", 1), ("south", 255)):
        centre(tmp_path / "data" / name, value, image, label)
    proposal = propose([tmp_path / "data"])
    assert [source.labels for source in proposal.file.sources] == [{"class_1": (1,)}, {"class_1": (255,)}]
    assert proposal.file.clients == ("north", "south") and "a guess" in " ".join(proposal.remarks)
    write(proposal.file, tmp_path / "federation.yaml")
    prepare(tmp_path / "federation.yaml")
