"""Studies come from an archive of others and masks go back to it: Orthanc with its DICOMweb plugin, behind TLS."""

import gzip
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import call

from data.dicom.test_masks import plant
from data.dicom.test_writing import CLASSES, MADE_BY, make_study, read_back
from orthanc import PASSWORD, USER, needs_orthanc, run_orthanc
from prediction.threshold import predictor
from wardround.data.dicom.patient_map import KEY, MAP, read_origins
from wardround.data.dicom.web import (
    LOGIN,
    Archive,
    download,
    explain_errors,
    fetch_studies,
    open_archive,
    store,
)
from wardround.data.dicom.writing import encode_rtstruct, encode_seg
from wardround.errors import ConfigError, DataError
from wardround.prediction.session import predict_into

pydicom = pytest.importorskip("pydicom")
pytest.importorskip("highdicom", reason="needs wardround[dicom]")
pytest.importorskip("dicomweb_client", reason="needs wardround[dicomweb]")


def write_certificate(folder: Path) -> Path:
    """A certificate for this machine that no authority signed, and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(secret + (folder / "ca.pem").read_bytes())
    return folder / "ca.pem"


@contextmanager
def encrypt(certificate: Path, port: int) -> Iterator[int]:
    """The port of a proxy that speaks TLS for a server that does not: Debian's Orthanc crashes when it does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(65536):
                target.sendall(content)
        for end in (source, target):  # the end of one way is the end of both
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:  # closed: the end
                return
            with suppress(OSError):  # of a client that does not trust us
                outside = context.wrap_socket(plain, server_side=True)
                inside = socket.create_connection(("127.0.0.1", port))
                for pair in ((outside, inside), (inside, outside)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def orthanc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of an archive of our own, and the certificate to trust."""
    folder = tmp_path_factory.mktemp("orthanc")
    certificate = write_certificate(folder)
    with run_orthanc(folder) as port, encrypt(folder / "server.pem", port) as safe:
        yield f"https://localhost:{safe}/dicom-web", certificate


@pytest.fixture
def archive(orthanc: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Archive:
    url, certificate = orthanc
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    monkeypatch.setenv(LOGIN, f"{USER}:{PASSWORD}")
    return open_archive(url)


def fill(
    archive: Archive, folder: Path, seed: int, encode: Any = encode_seg
) -> tuple[Any, np.ndarray, np.ndarray]:
    """A study with a mask in the archive, and what it is."""
    source, values, mask = make_study(folder, seed)
    (folder / "mask.dcm").write_bytes(encode(source, mask, CLASSES, MADE_BY))
    store(archive, sorted(folder.iterdir()))
    return source, values, mask


@needs_orthanc
@pytest.mark.parametrize(("encode", "seed"), [(encode_seg, 60), (encode_rtstruct, 61)])
def test_a_study_with_its_mask_is_fetched_as_it_was_stored(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    encode: Any, seed: int,
) -> None:  # fmt: skip
    source, values, mask = fill(archive, tmp_path / "in", seed, encode)
    command = ("data", "fetch", archive.url, str(tmp_path / "out"), "--modality", "CT")
    code, said, err = call(monkeypatch, capsys, *command, "--match", f"PatientID=*{seed}")
    assert code == 0 and "Wrote 2 files" in said, err
    image, _, label, names = read_back(tmp_path / "out")
    assert np.array_equal(image, values) and np.array_equal(label, mask) and names == CLASSES
    (origin,) = read_origins(tmp_path / "out").values()
    assert origin.source == f"{archive.url}/studies/{source.heads[0].StudyInstanceUID}"
    assert PASSWORD not in said + err


@needs_orthanc
def test_nothing_of_the_patient_is_in_any_byte_that_fetching_writes(archive: Archive, tmp_path: Path) -> None:
    source, _, mask = make_study(tmp_path / "in", 62)
    (tmp_path / "in" / "mask.dcm").write_bytes(encode_seg(source, mask, CLASSES, MADE_BY))
    secret = "MuellerHans4711"
    for path in sorted((tmp_path / "in").iterdir()):
        data = pydicom.dcmread(path)
        plant(data)
        data.PatientID = secret
        data.save_as(path)
    store(archive, sorted((tmp_path / "in").iterdir()))
    done = fetch_studies(archive, {"PatientID": secret}, tmp_path / "out", most=1)
    assert len(done.written) == 2
    words = re.compile(rf"mueller|hans|4711|19600131|1\.2\.8|{PASSWORD}|{USER}|https", re.IGNORECASE)
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file() and path.name not in (KEY, MAP):  # they stay at the hospital
            content = path.read_bytes()
            content = gzip.decompress(content) if path.suffix == ".gz" else content
            assert not words.search(content.decode("latin-1")), path
            assert not words.search(str(path.relative_to(tmp_path)))
    assert PASSWORD not in (tmp_path / "out" / MAP).read_text()


@needs_orthanc
def test_a_predicted_mask_goes_back_to_the_study_it_was_made_from(archive: Archive, tmp_path: Path) -> None:
    source, _, _ = fill(archive, tmp_path / "in", 63)
    study = source.heads[0].StudyInstanceUID
    made = predict_into(
        predictor(3),
        [f"{archive.url}/studies/{study}"],
        tmp_path / "back",
        to="dicom-seg",
        store_in=archive.url,
    )
    assert not made.problems, made.problems
    ((name, facts),) = made.done.items()
    assert facts["stored"] == archive.url
    download(archive, study, tmp_path / "again")
    ours = [pydicom.dcmread(path) for path in (tmp_path / "again").rglob("*.dcm")]
    (found,) = (
        data for data in ours if data.get("SeriesDescription") == "wardround FedAvg" and "lesion" in str(data)
    )
    sent = pydicom.dcmread(tmp_path / "back" / name)
    assert found.SOPInstanceUID == sent.SOPInstanceUID and np.array_equal(found.pixel_array, sent.pixel_array)
    again = predict_into(
        predictor(3), [tmp_path / "in"], tmp_path / "back", to="rtstruct", store_in=archive.url
    )
    assert "stored" in next(iter(again.done.values()))


@needs_orthanc
def test_what_goes_wrong_on_the_way_is_one_sentence(
    archive: Archive, orthanc: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fill(archive, tmp_path / "in", 64)
    fill(archive, tmp_path / "other", 65)
    url, out = archive.url, str(tmp_path / "out")

    def fetch(address: str, *more: str) -> str:
        code, said, err = call(monkeypatch, capsys, "data", "fetch", address, out, *more)
        assert code == 2 and err.startswith("error ") and err.count("\n") == 1 and PASSWORD not in said + err
        assert not (tmp_path / "out" / "images").exists()
        return err

    assert "no study matches" in fetch(url, "--match", "PatientID=nobody")
    assert "'PatientID'; write KEYWORD=VALUE" in fetch(url, "--match", "PatientID")
    assert "PatientsID is no keyword of DICOM" in fetch(url, "--match", "PatientsID=1")
    assert "More than 1 studies match" in fetch(url, "--limit", "1")
    assert "answers 404" in fetch(url.replace("dicom-web", "elsewhere"))
    assert "cannot be reached" in fetch("https://localhost:1/dicom-web")
    login = tmp_path / "login"
    login.write_text(f"{USER}:wrong")
    assert "can be read by others: chmod 600" in fetch(url, "--login", str(login))
    login.chmod(0o600)
    assert "answers 401: it refuses this login" in fetch(url, "--login", str(login))
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    assert "its certificate cannot be verified" in fetch(url)
    with pytest.raises(ConfigError, match="add --to dicom-seg"):
        predict_into(predictor(3), [tmp_path / "in"], tmp_path / "back", store_in=url)
    with pytest.raises(DataError, match="its certificate cannot be verified"):
        predict_into(predictor(3), [tmp_path / "in"], tmp_path / "back", to="dicom-seg", store_in=url)
    made = predict_into(predictor(3), [f"{url}/patients/1"], tmp_path / "back")
    assert "is not a study of an archive" in made.problems[0].reason


def test_addresses_that_would_tell_others_are_refused() -> None:
    for address, reason in {
        "http://pacs.example/dicom-web": "would send scans and login unencrypted",
        "https://alice:secret@pacs.example/dicom-web": "The address of pacs.example has a login in it",
        "pacs.example": "is not the address of an archive",
        "ftp://pacs.example": "is not the address of an archive",
    }.items():
        with pytest.raises(ConfigError, match=reason) as refused:
            open_archive(address)
        assert "secret" not in str(refused.value)
    for address in ("http://localhost:8042/x", "http://127.0.0.1/x", "http://[::1]:8042/x"):
        assert open_archive(address).url == address


def test_an_archive_that_redirects_or_talks_nonsense_is_left_alone() -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Odd(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            moved = self.path.startswith("/moved")
            self.send_response(302 if moved else 200)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(b"<html>a page to log in</html>")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for path, reason in {"moved": "redirects elsewhere", "page": "does not answer as DICOMweb"}.items():
            archive = open_archive(f"http://127.0.0.1:{server.server_port}/{path}")
            with pytest.raises(DataError, match=reason), explain_errors(archive):
                archive.client.search_for_studies()
    finally:
        server.shutdown()
        server.server_close()
