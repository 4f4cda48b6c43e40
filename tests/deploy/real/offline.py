"""Parity of FedAvg with no network but loopback: nothing changes. About a minute.

A network namespace of its own where the machine allows one; elsewhere every connection that leaves
loopback fails inside Python.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BLOCKED = """\
import os, socket

LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")


def guarded(function):
    def connect(self, address, *more):
        if isinstance(address, tuple) and not str(address[0]).startswith(LOOPBACK):
            with open(os.environ["WARDROUND_TRIED"], "a") as file:
                file.write(f"{address}\\n")
            raise OSError(101, f"the network is blocked: {address}")
        return function(self, address, *more)

    return connect


class Socket(socket.socket):
    connect = guarded(socket.socket.connect)
    connect_ex = guarded(socket.socket.connect_ex)


socket.socket = Socket
"""


def main() -> int:
    parity = [sys.executable, str(HERE / "parity.py"), "--only", "fedavg", *sys.argv[1:]]
    namespace = ["unshare", "--user", "--map-root-user", "--net"]
    up = 'ip link set lo up && exec "$@"'
    if shutil.which("unshare") and shutil.which("ip"):
        alone = subprocess.run([*namespace, "sh", "-c", up, "sh", "true"], capture_output=True)
        if alone.returncode == 0:
            sys.stderr.write("in a network namespace with loopback alone\n")
            return subprocess.run([*namespace, "sh", "-c", up, "sh", *parity]).returncode
    with tempfile.TemporaryDirectory() as folder:
        tried = Path(folder) / "tried.txt"
        (Path(folder) / "sitecustomize.py").write_text(BLOCKED)
        sys.stderr.write("with connections beyond loopback blocked in every process\n")
        environment = {**os.environ, "PYTHONPATH": folder, "WARDROUND_TRIED": str(tried)}
        code = subprocess.run(parity, env=environment).returncode
        if tried.exists():
            sys.stderr.write(f"connections were tried: {tried.read_text()}\n")
            return 1
        return code


if __name__ == "__main__":
    sys.exit(main())
