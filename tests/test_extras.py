"""Every import is declared, heavy ones in extras; without an extra the rest works, and errors name it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "wardround"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {"PIL": "pillow", "grpc": "grpcio", "yaml": "pyyaml"}  # where the import has another name
FOUND = {"IPython", "triton"}  # used where they are: in a notebook, beside PyTorch for GPUs
# What is imported only with its extra; the one module of secure sums that has it says so when it is used.
ROOMS = {
    "nvflare": ("deploy/nvflare",),
    "hospitals": ("deploy",),
    "privacy": ("privacy/secure_sum/primitives.py",),
}
SCRIPTS = "exporting/standalone"  # copied to people who have no wardround


def normalise(requirement: str) -> str:
    return re.split(r"[<>=\[;, ]", requirement)[0].lower().replace("_", "-")


def declared(extra: str) -> set[str]:
    return {normalise(requirement) for requirement in PROJECT["optional-dependencies"][extra]}


CORE = {normalise(requirement) for requirement in PROJECT["dependencies"]}
EXTRAS = (
    "dicom", "dicomweb", "hospitals", "mlflow", "nvflare", "onnx", "privacy", "ray", "slurm", "tensorboard",
)  # fmt: skip


def third_party() -> list[tuple[str, str, bool]]:
    """File, distribution and whether inside a function, of every import that is not ours or Python's."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        late = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names = [str(node.module)] if isinstance(node, ast.ImportFrom) else names
            for top in (
                {name.split(".")[0] for name in names} - sys.stdlib_module_names - FOUND - {"wardround"}
            ):
                if not place.startswith(SCRIPTS):
                    found.append((place, normalise(DISTRIBUTIONS.get(top, top)), id(node) in late))
    return found


def test_every_import_is_declared() -> None:
    everything = CORE.union(*(declared(extra) for extra in EXTRAS))

    assert {name for _, name, _ in third_party()} <= everything


def test_what_an_extra_brings_is_imported_late_or_in_its_own_room() -> None:
    early = []
    for place, name, is_late in third_party():
        homes = [home for extra in ROOMS if name in declared(extra) for home in ROOMS[extra]]
        if name not in CORE and not is_late and not place.startswith(tuple(homes) or ("-",)):
            early.append(f"{place}: {name}")

    assert not early


CODE = """
import importlib, pkgutil, sys
blocked = set(sys.argv[1].split(","))

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in [name for name in sys.modules if name.split(".")[0] in blocked]:
    del sys.modules[name]
sys.meta_path.insert(0, Absent())
util = importlib.import_module("importlib.util")
plain = util.find_spec
util.find_spec = lambda name, package=None: None if name.split(".")[0] in blocked else plain(name, package)

import wardround
rooms = tuple(f"wardround.{room}" for room in sys.argv[2].split(","))
for module in pkgutil.walk_packages(wardround.__path__, "wardround.", onerror=lambda name: None):
    if not module.name.startswith(rooms) and not module.name.endswith(("_kernels", "__main__")):
        importlib.import_module(module.name)
held = blocked & {name.split(".")[0] for name in sys.modules}
assert not held, held

import re
from pathlib import Path
from wardround import deploy
from wardround.cluster.options import open_cluster
from wardround.data.dicom import importing, web
from wardround.deploy import nvflare
from wardround.engine import trackers
from wardround.errors import WardroundError
from wardround.exporting import onnx
from wardround.privacy import accountant

for use in (
    importing.import_pydicom, lambda: web.open_archive("https://localhost", None), deploy.require,
    nvflare.require, onnx.check_installed, accountant.load_library,
    lambda: open_cluster("ray", {}), lambda: open_cluster("slurm", {}),
    lambda: trackers.import_optional("mlflow", "mlflow"),
    lambda: trackers.import_optional("tensorboard", "tensorboard"),
):
    try:
        use()
    except WardroundError as error:
        print(re.search(r"wardround\\[(\\w+)\\]", str(error))[1])

small = {"rounds": 1, "data": {"phantom": {"cases": 6, "size": 16}}, "model": {"name": "unet2d", "base_filters": 2}}
wardround.run(small | {"output": "run", "compute": {"workers": 1, "threads": 1}}, quiet=True)
wardround.export("run", "torch", "exported")
print("done")
"""


def test_without_any_extra_everything_else_is_imported_and_errors_name_the_extra(tmp_path: Path) -> None:
    blocked = "cryptography,dicomweb_client,grpc,highdicom,mlflow,nvflare,onnx,onnx_ir,onnxruntime,"
    blocked += "onnxscript,opacus,pydicom,ray,requests,submitit,tensorboard"
    rooms = "deploy.,cli.hospitals,exporting.standalone"
    done = subprocess.run(
        [sys.executable, "-c", CODE, blocked, rooms], capture_output=True, text=True, cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(done.stdout.split()) == sorted([*EXTRAS, "done"])


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_not_needed_by_the_core(extra: str) -> None:
    assert not declared(extra) & CORE
