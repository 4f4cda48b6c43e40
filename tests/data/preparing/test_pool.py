"""What goes to a helper process comes back as it was."""

import json
from pathlib import Path

from wardround.data.listing import Entry, LabelCoding
from wardround.data.preparing.pool import entry_again, plain_entry


def test_a_case_goes_through_the_pipe_with_its_masks_and_what_they_mean() -> None:
    masks = {"liver": Path("l.png"), "spleen": Path("s.png")}
    coding = LabelCoding({"#ff0000": 1}, {"liver": 1, "spleen": 2}, overlap=True)
    entry = Entry("north", "p1", (Path("i.png"),), Path("l.png"), "p1", masks=masks, coding=coding)
    for own in (entry, Entry("north", "p1", (Path("i.png"),), None, "p1", labels={"liver": (1, 2)})):
        again = entry_again(json.loads(json.dumps(plain_entry(own))))
        assert again == own and list(again.masks) == list(own.masks) and again.coding_text == own.coding_text
