"""An archive of others to test against: Orthanc from Debian's packages, with its DICOMweb plugin."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PLUGIN = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")
ORTHANC = shutil.which("Orthanc") or shutil.which("Orthanc", path="/usr/sbin")
needs_orthanc = pytest.mark.skipif(
    ORTHANC is None or not PLUGIN.exists(), reason="needs Debian's orthanc and orthanc-dicomweb"
)
USER, PASSWORD = "alice", "PlantedPassword77"


@contextmanager
def run_orthanc(folder: Path) -> Iterator[int]:
    """The port of an empty archive on this machine, which asks for a login and ends with the test."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "StorageDirectory": str(folder / "db"), "IndexDirectory": str(folder / "db"), "HttpPort": port,
        "DicomServerEnabled": False, "RemoteAccessAllowed": False, "AuthenticationEnabled": True,
        "RegisteredUsers": {USER: PASSWORD}, "Plugins": [str(PLUGIN)],
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
    }  # fmt: skip
    (folder / "orthanc.json").write_text(json.dumps(settings))
    with (folder / "log").open("wb") as log:
        assert ORTHANC is not None
        server = subprocess.Popen([ORTHANC, str(folder / "orthanc.json")], stdout=log, stderr=log)
    try:
        while "Orthanc has started" not in (folder / "log").read_text():
            assert server.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait(30)
