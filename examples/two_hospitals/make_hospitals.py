"""Two synthetic hospitals, each with scans and a federation.yaml of its own, as two machines would have them.

python make_hospitals.py FOLDER
"""

import sys
from pathlib import Path

from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings

FEDERATION = """\
# The cases of one hospital. It stays here; `wardround data check` checks it.
version: 1
sources:
  - {path: ., reader: centres}
channels: [image]
labels: {lesion: [1]}
regions: {lesion: [1]}
splits: {by: ratios, ratios: [0.7, 0.1, 0.2], seed: 42}
partition: {kind: natural}       # one hospital is one client
prepare: {size: [64, 64], normalise: zscore}
"""


def make(folder: Path) -> list[Path]:
    """The federation.yaml of each hospital."""
    phantom_files.write(PhantomSettings(hospitals=2, cases=30), folder, "nifti", seed=42)
    (folder / "index.csv").unlink()  # of both hospitals; no hospital has the other's list
    files = [hospital / "federation.yaml" for hospital in sorted(folder.iterdir())]
    for file in files:
        file.write_text(FEDERATION, encoding="utf-8")
    return files


if __name__ == "__main__":
    for file in make(Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals")):
        sys.stdout.write(f"{file}\n")
