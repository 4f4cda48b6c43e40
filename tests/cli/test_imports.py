"""Commands that only parse and print start at once: they do not import torch or what else takes seconds."""

from __future__ import annotations

import gc
import subprocess
import sys

from pytest import mark, raises

from wardround.cli.common import pause_gc

HEAVY = ("torch", "numpy", "scipy", "monai", "nibabel", "matplotlib", "nvflare", "sympy")

CODE = f"""
import sys
from wardround.cli import app
app(sys.argv[1:], standalone_mode=False)
held = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"imported: {{held}}" if held else 0)
"""


@mark.parametrize(
    "words", ["--help", "--version", "train --help", "status --help", "join --help", "data --help"]
)
def test_help_imports_nothing_heavy(words: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *words.split()], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_garbage_is_collected_again_after_imports() -> None:
    with raises(ValueError), pause_gc():
        assert not gc.isenabled()
        raise ValueError

    assert gc.isenabled()
