"""One version; a wheel that works outside the repository; no message that sends its user to the repository."""

from __future__ import annotations

import ast
import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import wardround as wr

ROOT = Path(__file__).parents[1]
REPOSITORY = ("configs/", "examples/", "docs/", "benchmarks/", "make test", "make demo")  # not in a wheel
RELEASE = [sys.executable, str(ROOT / "tools" / "release.py")]


def test_there_is_one_version() -> None:
    written = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

    assert wr.__version__ == importlib.metadata.version("wardround") == written


def test_no_text_of_the_package_names_a_file_of_the_repository() -> None:
    named = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_help = path.parent.name == "cli"  # a command's docstring is what --help prints
        documented = (ast.Module, ast.ClassDef) if is_help else (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
        }
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs]
        if any(word in str(node.value) for node in texts for word in REPOSITORY):
            named.append(path.relative_to(ROOT / "src" / "wardround").as_posix())

    assert set(named) <= {
        "exporting/bundle.py",  # folders of MONAI's bundles
        "data/datasets/page.py",  # writes that page
    }


def test_the_wheel_has_the_package_and_its_configurations_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RELEASE, "--no-trial", "--dist", str(tmp_path / "dist")], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert [path.suffix for path in sorted((tmp_path / "dist").iterdir())] == [".whl", ".gz"]


def test_a_tag_of_another_version_ends_the_release(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"], ["tag", "v9.9.9"]):
        subprocess.run([*git, *words], check=True)

    done = subprocess.run(
        [sys.executable, str(tmp_path / "tools/release.py"), "--no-trial", "--dist", str(tmp_path / "dist")],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 1 and done.stderr == (
        f"This commit is tagged v9.9.9, but pyproject.toml says {wr.__version__}.\n"
    )


def test_workflows_call_targets_that_the_makefile_has() -> None:
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    called = []
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            called += [
                step["run"].split()[1] for step in job["steps"] if step.get("run", "").startswith("make ")
            ]

    assert {"test", "release", "docs", "browser"} <= set(called)
    assert all(f"\n{target}:" in targets for target in called)


@pytest.mark.slow
def test_the_wheel_is_installed_elsewhere_and_does_the_work_of_a_first_day(tmp_path: Path) -> None:
    probe = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "filelock"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("no package index can be reached from here")
    done = subprocess.run([*RELEASE, "--dist", str(tmp_path / "dist")], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "wardround export runs/quickstart-3d --to torch" in done.stdout
