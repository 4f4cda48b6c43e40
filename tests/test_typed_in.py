"""The shell and Python blocks of the documentation, typed in page by page as they stand.

A page is read from top to bottom by somebody who has what BEFORE says. Commands are what the page has, with
less to do: the quick starts are tiny, budgets are four steps, and cells of a comparison run in this process.
"""

from __future__ import annotations

import json
import linecache
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from code_blocks import CODE, ROOT, Block, commands
from helpers import call
from safetensors.torch import save_file

from wardround import builtin_configs
from wardround.models import ModelSettings, build

ELSEWHERE = {  # by name, in the test that types them in
    "docs/tutorial/first-federation.md": "test_tutorial.py",
    "docs/how-to/pacs.md": "test_tutorial.py",
    "docs/how-to/unequal-labels.md": "test_docs.py",
    "docs/how-to/unlabelled.md": "test_docs.py",
    "docs/how-to/add-a-method.md": "test_docs.py",
    "docs/how-to/python.md": "test_public_api.py",
    "docs/reference/python.md": "test_public_api.py",
}
HOSPITALS = """
wardround data phantom scans --hospitals 2 --set data.phantom.cases=10 --set data.phantom.size=32
mv scans/north north
mv scans/east south
"""
SCAN = "cp north/images/north-001.nii.gz scan.nii.gz\n"
FEDERATION = f"{HOSPITALS}wardround data init north south -o federation.yaml\n"
RUN = "wardround train quickstart\n"
MINE = "wardround train quickstart --set name=mine --set data.federation=federation.yaml\n"
COMPARED = "wardround compare quickstart -o runs/comparison --methods fedavg --seeds 1\n"
KIT = """
wardround rehearse quickstart --set name=prostate-1
cp runs/prostate-1/rehearsal/kits/north north
"""
VOLUMES = """
wardround data phantom volumes --hospitals 2 --dimensions 3 --set data.phantom.cases=8 --set data.phantom.size=16
wardround data init volumes/north volumes/east -o volumes.yaml
"""
BEFORE = {
    "README.md": HOSPITALS + SCAN,
    "docs/explanation/data-protection.md": KIT,
    "docs/gallery.md": "",
    "docs/how-to/clusters.md": "wardround configs copy compare-quickstart -o grid.yaml",
    "docs/how-to/compare.md": "",
    "docs/how-to/configure.md": HOSPITALS,
    "docs/how-to/export.md": HOSPITALS + SCAN + RUN,
    "docs/how-to/from-flower.md": "",
    "docs/how-to/from-monai.md": "",
    "docs/how-to/from-nnunet.md": VOLUMES,
    "docs/how-to/from-nvflare.md": "",
    "docs/how-to/hospitals.md": KIT,
    "docs/how-to/networks.md": "",
    "docs/how-to/own-data.md": HOSPITALS + VOLUMES,
    "docs/how-to/nvidia-flare.md": "",
    "docs/how-to/plan.md": "",
    "docs/how-to/predict.md": f"{FEDERATION}{SCAN}{MINE}cp south other_hospital\ncp north/images folder",
    "docs/how-to/read-the-report.md": f"{RUN}{COMPARED}cp runs/quickstart runs/a\ncp runs/quickstart runs/b",
    "docs/how-to/run-and-resume.md": "",
    "docs/reference/papers.md": "",
    "docs/site/front.md": "",
    "examples/own_code/README.md": "cp examples examples",
    "examples/own_data/README.md": "cp examples examples",
    "examples/two_hospitals/README.md": "cp examples examples",
}
SLOW = {
    "README.md",
    "docs/explanation/data-protection.md",
    "docs/gallery.md",
    "docs/how-to/clusters.md",
    "docs/how-to/compare.md",
    "docs/how-to/configure.md",
    "docs/how-to/export.md",
    "docs/how-to/from-monai.md",
    "docs/how-to/from-nvflare.md",
    "docs/how-to/hospitals.md",
    "docs/how-to/run-and-resume.md",
    "docs/reference/papers.md",
    "docs/site/front.md",
    "examples/own_code/README.md",
    "examples/own_data/README.md",
    "examples/two_hospitals/README.md",
}
PLAN = {  # as nnU-Net 2.8.1 writes it
    "dataset_name": "Dataset001_Brain",
    "plans_name": "nnUNetPlans",
    "original_median_spacing_after_transp": [12.0, 12.0, 12.0],
    "original_median_shape_after_transp": [16, 16, 16],
    "image_reader_writer": "SimpleITKIO",
    "transpose_forward": [0, 1, 2],
    "transpose_backward": [0, 1, 2],
    "configurations": {
        "3d_fullres": {
            "batch_size": 2,
            "patch_size": [16, 16, 16],
            "spacing": [12.0, 12.0, 12.0],
            "normalization_schemes": ["ZScoreNormalization"],
            "use_mask_for_norm": [False],
            "architecture": {
                "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
                "arch_kwargs": {
                    "n_stages": 2,
                    "features_per_stage": [4, 8],
                    "conv_op": "torch.nn.modules.conv.Conv3d",
                    "kernel_sizes": [[3, 3, 3], [3, 3, 3]],
                    "strides": [[1, 1, 1], [2, 2, 2]],
                    "n_conv_per_stage": [1, 1],
                    "n_conv_per_stage_decoder": [1],
                    "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
                    "dropout_op": None,
                },
            },
            "batch_dice": True,
        }
    },
    "foreground_intensity_properties_per_channel": {
        "0": {"mean": 1.0, "std": 1.0, "percentile_00_5": 0.0, "percentile_99_5": 2.0, "max": 3.0}
    },
}
TINY = {
    "rounds": 3,
    "batch_size": 4,
    "model": {"name": "unet2d", "base_filters": 2, "levels": 2},
    "evaluate": {"overlays": 1},
    "compute": {"workers": 1, "threads": 1},
}
TINY_GRID = {"methods": ["fedavg", "fedevi"], "seeds": 2, "reference": "fedavg"}


def write_nnunet() -> None:
    """Two raw folders of nnU-Net, and a plan of it for them."""
    for client, hospital in {"north": "north", "south": "east"}.items():
        raw = Path(client) / "Dataset001_Brain"
        for part, ending in {"images": "_0000", "labels": ""}.items():
            (raw / f"{part}Tr").mkdir(parents=True)
            for path in Path("volumes", hospital, part).iterdir():
                shutil.copy(path, raw / f"{part}Tr" / path.name.replace(".nii", f"{ending}.nii"))
        about = {"channel_names": {"0": "t1"}, "labels": {"background": 0, "lesion": 1}, "numTraining": 8}
        (raw / "dataset.json").write_text(json.dumps(about | {"file_ending": ".nii.gz"}))
    folder = Path("nnUNet_preprocessed/Dataset001_Brain")
    folder.mkdir(parents=True)
    (folder / "nnUNetPlans.json").write_text(json.dumps(PLAN))


def write_weights() -> None:
    """The first layers of a pretrained network, as safetensors and as PyTorch's own file."""
    network = build(ModelSettings(name="unet3d"), in_channels=1, num_outputs=1, dimensions=3)
    some = dict(list(network.state_dict().items())[:4])
    torch.save(some, "pretrained.pt")
    save_file(some, "pretrained.safetensors")


WRITE = {"docs/how-to/from-nnunet.md": write_nnunet, "docs/how-to/networks.md": write_weights}


def mark(page: str) -> pytest.ParameterSet:
    return pytest.param(page, marks=pytest.mark.slow if page in SLOW else [])


def test_no_block_is_left_out() -> None:
    assert {block.page for block in CODE if block.reason is None} <= {*BEFORE, *ELSEWHERE}


@pytest.mark.parametrize("page", [mark(page) for page in BEFORE])
def test_every_block_of_a_page_runs(
    page: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path_factory.mktemp("package") / "configs"  # not where the reader is
    copy_configs(package)
    monkeypatch.setattr(builtin_configs, "PACKAGED", package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda *_: True)
    monkeypatch.setattr("wardround.data.phantom.cases._CASES", (10, 10, 10, 10))
    monkeypatch.setattr("wardround.demo.SETTINGS", TINY)
    monkeypatch.setattr("wardround.demo.PAPERS", {"fedevi": "FedEvi"})
    names: dict[str, object] = {"__name__": "__main__"}

    def type_whole(block: Block) -> None:
        for words in commands(block):
            type_in(words, monkeypatch, capsys, block)

    type_whole(Block(page, 0, "shell", BEFORE[page], None))
    if page in WRITE:
        WRITE[page]()
    for block in CODE:
        if block.page == page and block.reason is None:
            monkeypatch.chdir(tmp_path)
            run_cell(block, names) if block.kind == "python" else type_whole(block)


def run_cell(block: Block, names: dict[str, object]) -> None:
    """As a notebook does, which keeps the source."""
    source = block.text
    linecache.cache[f"<{block}>"] = (len(source), None, source.splitlines(keepends=True), f"<{block}>")
    exec(compile(source, f"<{block}>", "exec"), names)


def copy_configs(folder: Path) -> None:
    """What comes with wardround, the quick starts tiny."""
    shutil.copytree(ROOT / "configs", folder)
    for name, more in {"quickstart": {}, "compare-quickstart": {"sweep": TINY_GRID}}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **TINY, **more}))


def type_in(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: Block
) -> None:
    match words[0]:
        case "wardround" if "slurm" in words:  # submitit warns of processes that it leaves
            start("python", "-m", "wardround", *shrink(words[1:]))
        case "wardround":
            words = shrink(words[1 : words.index(">") if ">" in words else None])
            code, _, said = call(monkeypatch, capsys, *words)
            assert code == 0, f"{where}: wardround {' '.join(words)}: {said}"
        case "cd":
            monkeypatch.chdir(words[1])
        case "cp":
            origin = ROOT / words[1] if words[1] == "examples" else Path(words[1])
            (shutil.copytree if origin.is_dir() else shutil.copy)(origin, words[2])
        case "mv":
            shutil.move(words[1], words[2])
        case "python" | "bash":
            start(*words)
        case "pip":
            install(*words[1:])
        case _:
            pytest.fail(f"{where}: say how to type in: {' '.join(words)}")


def shrink(words: list[str]) -> list[str]:
    """The same command with less to do; what a page trains twice is replaced."""
    if words[0] == "compare":
        return [*words, *(["--on-options", "executor=local"] if "slurm" in words else ["--jobs", "1"])]
    if words[0] not in ("train", "configure") or words[1].startswith(("quickstart", "runs/")):
        return words
    if "--budget" in words:
        words[words.index("--budget") + 1] = "4"
    elif words[1] != "run.yaml" and "--resume" not in words:
        words = [*words, "--budget", "4"]
    return words if words[0] == "configure" or "--resume" in words else [*words, "--overwrite"]


def start(*words: str) -> None:
    """A program of this environment; what it would write to /tmp goes here."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words = tuple(word.replace("/tmp/", f"{Path.cwd()}/") for word in words)
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PATH": path})
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@cache
def install(*words: str) -> None:
    """What the page wants installed is, in this environment."""
    start("python", "-m", "pip", "--isolated", *words, "--no-index", "--dry-run")
