"""An archive that speaks DICOMweb, such as a PACS or Orthanc: studies come from it, masks go back.

    archive = open_archive("https://pacs.example/dicom-web", login)
    fetch_studies(archive, {"PatientID": "4711"}, Path("north"))       QIDO-RS, WADO-RS, then the import
    download(archive, study, folder)                                   the DICOM files as they are
    store(archive, paths)                                              STOW-RS

Only the address that the user gives is connected to: by TLS with a verified certificate (plain http to this
machine alone), and redirects are not followed. The login, `user:password` or a token, is in the environment
or in a file that its owner alone can read, never on the command line; nothing logs it.

Needs dicomweb-client: pip install wardround[dicomweb]
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from wardround.data.dicom.importing import Imported, Watch, import_dicom, import_pydicom, silence_pydicom
from wardround.data.dicom.masks import KINDS
from wardround.errors import ConfigError, DataError, WardroundError
from wardround.machine import is_loopback, others_may

LOGIN = "WARDROUND_DICOMWEB_LOGIN"
SECONDS = (10.0, 300.0)  # to connect, and between two parts of an answer
MOST_BYTES = 2**36  # of one study; they have a few gigabytes
MOST_SERIES = 10_000
UID = re.compile(r"[0-9.]{1,64}")
STUDY = re.compile(
    r"(?P<archive>https?://.+)/studies/(?P<study>[0-9.]{1,64})(?:/series/(?P<series>[0-9.]{1,64}))?/?"
)


@dataclass(frozen=True)
class Archive:
    """url: without a slash at its end; client: of dicomweb-client, with its login."""

    url: str
    client: Any


def open_archive(url: str, login: Path | None = None) -> Archive:
    """Nothing is sent yet; login: a file, None for what the environment says, if anything."""
    url = url.rstrip("/")
    check_address(url)
    try:
        import requests
        from dicomweb_client.web import DICOMwebClient  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise DataError(
            "Archives need dicomweb-client. Install it with: pip install 'wardround[dicomweb]'"
        ) from None
    for name in ("retrying", "dicomweb_client"):  # they log what was asked for, with tracebacks
        logging.getLogger(name).setLevel(logging.CRITICAL)
    session = requests.Session()
    session.max_redirects = 0
    said = read_login(login)
    kind = f"Basic {b64encode(said.encode()).decode()}" if ":" in said else f"Bearer {said}"

    def prepare(request: Any) -> Any:
        """Add the login; wildcards stay as they are and blanks are %20: some archives decode no more."""
        if said:
            request.headers["Authorization"] = kind
        place, mark, query = request.url.partition("?")
        request.url = place + mark + query.replace("+", "%20").replace("%2A", "*")
        return request

    session.auth = prepare
    client = DICOMwebClient(url, session=session, timeout=SECONDS)
    client.set_http_retry_params(retry=False)  # it would try a wrong address for half a minute
    return Archive(url, client)


def check_address(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url} is not the address of an archive, such as https://pacs.example/dicom-web.")
    if "@" in parts.netloc:  # it would be in the history of the shell, and in lists of processes
        raise ConfigError(
            f"The address of {parts.hostname} has a login in it; move that to {LOGIN}, or a file for --login."
        )
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(
            f"{url} would send scans and login unencrypted. Use https://, or a tunnel such as "
            f"ssh -L 8042:{parts.hostname}:{parts.port or 80} and http://localhost:8042."
        )


def read_login(path: Path | None) -> str:
    """user:password, a token, or nothing."""
    if path is None:
        return os.environ.get(LOGIN, "").strip()
    try:
        if others_may(path, 0o077):
            raise ConfigError(f"{path} can be read by others: chmod 600 {path}")
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"--login {path} cannot be read: {reason}.") from None


@contextmanager
def explain_errors(archive: Archive) -> Iterator[None]:
    """Whatever goes wrong on the way becomes one sentence, without what was asked for."""
    import requests

    url = archive.url
    try:
        yield
    except requests.exceptions.SSLError:
        raise DataError(
            f"{url}: its certificate cannot be verified. If the hospital has an authority of its own, name "
            "the certificate of that: REQUESTS_CA_BUNDLE=hospital-ca.pem"
        ) from None
    except requests.TooManyRedirects:
        raise DataError(f"{url} redirects elsewhere; give the address itself.") from None
    except requests.HTTPError as error:
        code = 0 if error.response is None else error.response.status_code
        if code in (401, 403):
            advice = (
                f"it refuses this login; put user:password or a token into {LOGIN}, or a file for --login"
            )
        elif code in (404, 405):
            advice = "there is no DICOMweb at this address, or no such study"
        else:
            known = next((status.phrase for status in HTTPStatus if status == code), "no reason given")
            advice = f"{known}; ask those who run it"
        raise DataError(f"{url} answers {code}: {advice}.") from None
    except (requests.ConnectionError, requests.Timeout) as error:
        what = "does not answer in time" if isinstance(error, requests.Timeout) else "cannot be reached"
        raise DataError(f"{url} {what}; check the address, the network, and that the archive runs.") from None
    except requests.exceptions.ChunkedEncodingError:
        raise DataError(f"{url} broke off its answer; try again.") from None
    except Exception as error:  # what is no DICOM, or no JSON, may break the libraries in any way
        ours = isinstance(error, WardroundError | OSError) and not isinstance(
            error, requests.RequestException
        )
        if ours:  # such as a full disk
            raise
        raise DataError(f"{url} does not answer as DICOMweb does; is this the right address?") from None


def check_reachable(archive: Archive) -> None:
    """Before long work: the archive is there and takes the login; it need not allow queries."""
    with explain_errors(archive):
        answer = archive.client._session.get(f"{archive.url}/studies", params={"limit": 1}, timeout=SECONDS)
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            answer.raise_for_status()


# From the archive


@dataclass(frozen=True)
class RemoteSeries:
    """num_instances: what the archive says it has; None where it does not."""

    uid: str
    modality: str
    num_instances: int | None


def find_studies(archive: Archive, match: Mapping[str, str], most: int) -> list[str]:
    """UIDs of studies; match: DICOM keyword -> what QIDO-RS takes, such as StudyDate=20240101-20240331."""
    from pydicom.datadict import tag_for_keyword  # type: ignore[import-not-found,unused-ignore]

    for keyword in match:
        if tag_for_keyword(keyword) is None:
            raise ConfigError(f"--match: {keyword} is no keyword of DICOM, such as PatientID or StudyDate.")
    with explain_errors(archive):
        found = archive.client.search_for_studies(search_filters=dict(match), limit=most + 1)
        uids = sorted({read_value(study, "0020000D") for study in found})
    if len(uids) > most:
        raise DataError(f"More than {most} studies match; narrow --match, or raise --limit.")
    if not uids:
        raise DataError(f"{archive.url}: no study matches. Check --match.")
    check_uids(uids, archive)
    return uids


def list_series(archive: Archive, study: str) -> list[RemoteSeries]:
    with explain_errors(archive):
        found = archive.client.search_for_series(study_instance_uid=study, limit=MOST_SERIES)
        series = [
            RemoteSeries(
                read_value(one, "0020000E"),
                read_value(one, "00080060"),
                int(number) if (number := read_value(one, "00201209")).isdecimal() else None,
            )
            for one in found
        ]
    check_uids([one.uid for one in series], archive)
    return series


def read_value(facts: Mapping[str, Any], tag: str) -> str:
    """The first value of a tag in DICOM's JSON; empty where there is none."""
    values = facts.get(tag, {}).get("Value") or [""]
    return str(values[0])


def check_uids(uids: Sequence[str], archive: Archive) -> None:
    if not all(UID.fullmatch(uid) for uid in uids):  # they become names of folders
        raise DataError(f"{archive.url} answers with UIDs that are none.")


@silence_pydicom()
def download(
    archive: Archive, study: str, folder: Path, *, modality: str | None = None, only: str | None = None
) -> None:
    """The files of a study, a folder a series.

    modality: of images, and masks come with them; only: the UID of the one series wanted.
    """
    size = 0
    for series in list_series(archive, study):
        if modality is not None and series.modality.upper() not in (modality.upper(), *KINDS):
            continue
        if only is not None and series.uid != only:
            continue
        place = folder / series.uid
        place.mkdir(parents=True, exist_ok=True)
        number = 0
        with explain_errors(archive):
            for number, data in enumerate(archive.client.iter_series(study, series.uid), start=1):
                if str(data.get("SeriesInstanceUID")) != series.uid:
                    raise DataError(f"{archive.url} answers with files of another series than {series.uid}.")
                file = place / f"{number:06d}.dcm"
                data.save_as(file, enforce_file_format=True)
                size += file.stat().st_size
                if size > MOST_BYTES:
                    raise DataError(f"{archive.url}: study {study} has more than {MOST_BYTES >> 30} GiB.")
        if series.num_instances is not None and number < series.num_instances:
            raise DataError(
                f"{archive.url}: only {number} of {series.num_instances} files of series {series.uid} came; "
                "try again."
            )


def fetch_studies(
    archive: Archive,
    match: Mapping[str, str],
    target: Path,
    *,
    modality: str | None = None,
    most: int,
    structures: Mapping[str, str] | None = None,
    keep_descriptions: bool = False,
    burned_in: bool = False,
    watch: Watch = lambda number, total, name: None,
) -> Imported:
    """Import the studies that match into a centre's folder; their DICOM files are thrown away.

    A study that fails is noted and the others go on. most: refuse to fetch more studies.
    """
    import_pydicom()
    done = Imported()
    studies = find_studies(archive, match, most)
    for number, study in enumerate(studies, start=1):
        with tempfile.TemporaryDirectory(prefix="wardround-") as workplace:
            try:
                download(archive, study, Path(workplace), modality=modality)
                found = import_dicom(
                    Path(workplace),
                    target,
                    structures=structures,
                    keep_descriptions=keep_descriptions,
                    burned_in=burned_in,
                    place=f"{archive.url}/studies/{study}",
                )
            except DataError as error:
                reason = str(error).replace(workplace, study)
                done.notes.append(f"study {study}: {reason.rstrip('.')}; left out.")
            else:
                done.written += found.written
                done.notes += [f"study {study}: {note}" for note in found.notes]
        watch(number, len(studies), study)
    if not (target / "index.csv").exists():
        raise DataError(" ".join([f"{archive.url}: no series could be imported.", *done.notes[:3]]))
    return done


# Back to it


def store(archive: Archive, paths: Sequence[Path]) -> None:
    """Send DICOM files; a DataError says which the archive did not take."""
    pydicom = import_pydicom()
    for path in paths:
        with explain_errors(archive):
            answer = archive.client.store_instances([pydicom.dcmread(path)])
        if answer.get("FailedSOPSequence"):
            code = answer.FailedSOPSequence[0].get("FailureReason", 0)
            raise DataError(f"{archive.url} did not take {path.name} (failure reason {int(code):#06x}).")
