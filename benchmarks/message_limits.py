"""What the largest allowed and the smallest refused messages cost whoever reads them.

Each message is written to a file and read as the server reads a reply (`read_parcel`, then `unpack` within
the bounds of a hospital that registered one small tensor, unless a line says otherwise), in a process of its
own. Time is that of the process's own CPU; memory is the peak of resident memory over what was resident
before, file pages included.

    python benchmarks/message_limits.py                   # all of them
    python benchmarks/message_limits.py --only bomb
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wardround.clients import Registration
from wardround.config import TrafficSettings
from wardround.deploy import limits
from wardround.deploy.parcel_file import read_parcel, write_parcel
from wardround.deploy.remote import bound_reply
from wardround.deploy.wire import SCHEMA, Parcel, ParcelError, compute_sha256, pack, unpack
from wardround.messages import Message
from wardround.params import Params

ADDRESS: dict[str, Any] = {
    "kind": "reply", "run": "r", "request": "q", "client": "north", "task": "train", "round": 0,
}  # fmt: skip
SMALL = {"w": torch.zeros(20, 30)}
LISTS = f'{{"schema": "{SCHEMA}", "x": [{"[]," * 999_990}0]}}'  # not too many: all of them are read
LARGE_MODEL = 64 * 2**20  # numbers: 256 MiB


def write_file(path: Path, header: bytes, numbers: bytes = b"") -> None:
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + numbers)


def write_large(path: Path, compress: str) -> None:
    """256 MiB of noise, which hardly compresses."""
    noise = torch.randn(LARGE_MODEL, generator=torch.Generator().manual_seed(0))
    traffic = TrafficSettings(compress=compress)  # type: ignore[arg-type]
    write_parcel(path, pack(Message(Params({"w": noise})), **ADDRESS, traffic=traffic))


def write_zeros(path: Path, shape: list[int], count: int, *, extra: bool = False) -> None:
    """A tensor declared with this shape whose compressed bytes give `count` zeros."""
    packer, piece = zlib.compressobj(level=1, strategy=zlib.Z_RLE), bytes(2**20)
    small = b"".join([*(packer.compress(piece) for _ in range(count // 2**20)), packer.flush()])
    extras = {"bank": Params({"x": torch.zeros(2)})} if extra else {}
    parcel = pack(Message(Params(SMALL), extras), **ADDRESS)
    key = "extras/bank/x" if extra else "params/w"
    parcel.header["tensors"][key] |= {"shape": shape, "compress": "zlib"}
    arrays = {**parcel.arrays, key: np.frombuffer(small, np.uint8)}
    header = parcel.header | {"sha256": compute_sha256(parcel.header, arrays)}
    write_parcel(path, Parcel(header, arrays))


def write_shape(path: Path, shape: list[int]) -> None:
    parcel = pack(Message(Params(SMALL)), **ADDRESS)
    parcel.header["tensors"]["params/w"]["shape"] = shape
    write_parcel(path, parcel)


def write_scores(path: Path) -> None:
    """As many cases as fit into a header."""
    regions = {name: {"dice": 0.123456789, "hd95": 1.23456789} for name in ("tumour", "oedema")}
    rows = [{"case": f"case-{n:06d}", "loss": 0.123456789, "regions": regions} for n in range(85_000)]
    parcel = pack(Message(scalars={"cases": rows}), **{**ADDRESS, "task": "evaluate"})
    write_parcel(path, parcel)


def write_header(path: Path, text: str) -> None:
    write_file(path, json.dumps({"__metadata__": {"parcel": text}}).encode())


MESSAGES: dict[str, Callable[[Path], None]] = {
    "allowed: 256 MiB as it is": lambda path: write_large(path, "none"),
    "allowed: 256 MiB compressed": lambda path: write_large(path, "zlib"),
    "allowed: scores of 85,000 cases": write_scores,
    "allowed: 64 MiB bomb as an extra": lambda path: write_zeros(path, [2**24], 2**26, extra=True),
    "refused: 999,990 empty lists": lambda path: write_header(path, LISTS),
    "refused: 2 GiB bomb as a parameter": lambda path: write_zeros(path, [2**29], 2**31),
    "refused: 2 GiB bomb as an extra": lambda path: write_zeros(path, [2**29], 2**31, extra=True),
    "refused: 2 GiB bomb that declares 2,400 bytes": lambda path: write_zeros(path, [20, 30], 2**31),
    "refused: 5,000 axes": lambda path: write_shape(path, [2**62] * 5000),
    "refused: nine axes": lambda path: write_shape(path, [1] * 9),
    "refused: nested 100,000 deep": lambda path: write_header(path, "[" * 100_000),
    "refused: a side of 10**400": lambda path: write_header(path, f'{{"shape": [{10**400}]}}'),
    "refused: 60 million items": lambda path: write_file(path, b"[" + b"0," * 30_000_000 + b"0]"),
    "refused: a file of 1 TB": lambda path: path.open("wb").truncate(10**12) and None,
}  # fmt: skip


def read_as_server(path: Path, name: str) -> str:
    """What reading ends with."""
    task = "evaluate" if "scores" in name else "train"
    model = {"w": ((LARGE_MODEL,), torch.float32)} if "256 MiB" in name else Params(SMALL)
    specs = model if isinstance(model, dict) else {key: model.spec(key) for key in model}
    bounds = bound_reply(task, Registration("north", 8, tensors=specs))
    try:
        message, _ = unpack(read_parcel(path, bounds["largest"]), **{**ADDRESS, "task": task}, **bounds)
    except ParcelError as error:
        return str(error)
    return f"{sum(group.num_bytes for group in message.tensors().values()):,} bytes of tensors"


def measure(path: Path, name: str) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, started = find_peak(), time.process_time()
    ended = read_as_server(path, name)
    seconds = time.process_time() - started
    print(json.dumps({"seconds": seconds, "MiB": (find_peak() - before) / 2**10, "ended": ended}))


def find_peak() -> int:
    """Peak of resident memory, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="messages whose name holds this")
    parser.add_argument("--folder", type=Path, help="where messages are written; needs 2 GB")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(Path(arguments.measure[0]), arguments.measure[1])
        return
    print(f"limits: {limits.HEADER_CHARACTERS:,} characters, {limits.ITEMS:,} items, {limits.AXES} axes")
    print(f"{'message':48} {'file':>14} {'CPU s':>7} {'MiB':>7}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "message"
        for name, write in MESSAGES.items():
            if arguments.only in name:
                write(path)
                command = [sys.executable, __file__, "--measure", str(path), name]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout)
                size, seconds, memory = path.stat().st_size, found["seconds"], found["MiB"]
                print(f"{name:48} {size:>14,} {seconds:>7.3f} {memory:>7.0f}  {found['ended'][:90]}")
                path.unlink()


if __name__ == "__main__":
    main()
