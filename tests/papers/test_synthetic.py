"""Synthetic sets are read as the published ones: clients, channels and label values of their cards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wardround.data.datasets import load_preset
from wardround.data.datasets.preset import find_cases, read_preset
from wardround.data.readers.image_files import read_image, read_label
from wardround.papers.presets import list_names, load
from wardround.papers.synthetic import write_dataset

SETS: dict[str, list[str]] = {}
for preset in map(load, list_names()):
    for federation in preset.datasets.values():
        for source in federation.clients.values():
            SETS.setdefault(source.dataset, [])
            if source.key not in SETS[source.dataset]:
                SETS[source.dataset].append(source.key)


@pytest.mark.parametrize("name", SETS)
def test_a_synthetic_set_has_the_layout_of_its_card(name: str, tmp_path: Path) -> None:
    card = load_preset(name)
    write_dataset(card, tmp_path, dict.fromkeys(SETS[name], 3), (16,) * card.dimensions)
    if card.reader == "msd":
        found = [(entry, card.labels) for entry in read_preset(card, tmp_path).entries]
    else:
        found = [(case.entry, card.values_of(case.part)) for case in find_cases(card, tmp_path)[0]]
        if name not in SETS[name]:  # the card names clients of its own
            assert sorted({entry.client for entry, _ in found}) == sorted(SETS[name])
    assert len(found) == 3 * len(SETS[name])
    entry, labels = found[-1]
    assert read_image(entry.images).channels == len(card.channels)
    assert entry.label is not None
    held = {int(value) for value in np.unique(read_label(entry.label).data)}
    assert {value for values in labels.values() for value in values[:1]} <= held
