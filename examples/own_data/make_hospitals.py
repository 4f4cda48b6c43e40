"""Two synthetic hospitals as folders of images and labels, and the two commands that train on them.

python make_hospitals.py FOLDER
"""

import sys
from pathlib import Path

from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings


def make(folder: Path) -> list[Path]:
    """The hospitals' folders, with scans and labels and nothing else, as a hospital has them."""
    phantom_files.write(PhantomSettings(hospitals=2, cases=30), folder, "nifti", seed=42)
    (folder / "index.csv").unlink()  # the splits are drawn by wardround, as for a folder of your own
    return sorted(path for path in folder.iterdir() if path.is_dir())


if __name__ == "__main__":
    hospitals = make(Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals"))
    names = " ".join(str(path) for path in hospitals)
    sys.stdout.write(
        f"wardround data init {names} -o federation.yaml\n"
        "wardround train quickstart --set data.federation=federation.yaml "
        "--set output=runs/own_data\n"
    )
