"""The cache: made once, whatever happens meanwhile."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wardround.data.federation_file import FederationFile
from wardround.data.listing import Entry
from wardround.data.preparing import cache as cache_module
from wardround.data.preparing import pool as preparing
from wardround.data.preparing.cache import Cache, load
from wardround.data.preparing.geometry import invert_label
from wardround.data.preparing.pool import PreparedCases, prepare_cases
from wardround.errors import ConfigError, DataError


def federation(**prepare: object) -> FederationFile:
    wanted = {"size": (16, 16), **prepare}
    return FederationFile.model_validate(
        {"sources": [{"path": "."}], "labels": {"lesion": (255,)}, "prepare": wanted}
    )


def make(folder: Path, number: int = 4, client: str = "north") -> list[Entry]:
    """Pictures of noise with a square drawn in each."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, entries = np.random.default_rng(0), []
    for index in range(number):
        name = f"case {index:03d}"
        mask = np.zeros((24, 24), np.uint8)
        mask[4:12, 4 : 8 + index % 8] = 255
        Image.fromarray(rng.integers(0, 255, (24, 24), dtype=np.uint8)).save(folder / f"{name}.png")
        Image.fromarray(mask).save(folder / f"{name}-label.png")
        entries.append(
            Entry(client, name, (folder / f"{name}.png",), folder / f"{name}-label.png", group=name)
        )
    return entries


def files_under(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.rglob("*.safetensors")
    }


def whole(outcome: PreparedCases, entries: Sequence[Entry]) -> bool:
    """Every case prepared, readable, right."""
    assert not outcome.failures
    assert set(outcome.paths) == {(entry.client, entry.name) for entry in entries}
    for path in outcome.paths.values():
        found = load(path)
        assert found.case.image.shape == (1, 16, 16) and found.case.label.max() == 1
        assert torch.isfinite(found.case.image).all()
    return True


def test_cases_are_prepared_once_and_mapped(tmp_path: Path) -> None:
    entries, cache = make(tmp_path / "data"), Cache(tmp_path / "cache")
    seen: list[tuple[int, int, str]] = []
    first = prepare_cases(cache, entries, federation(), jobs=1, watch=lambda *step: seen.append(step))
    assert whole(first, entries)
    assert [step[:2] for step in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)] and "case 000" in seen[0][2]
    before = files_under(cache.folder)
    assert prepare_cases(cache, entries, federation(), jobs=2).paths == first.paths
    assert files_under(cache.folder) == before
    maps = Path("/proc/self/maps")
    found = load(first.paths["north", "case 000"])
    assert not maps.exists() or str(first.paths["north", "case 000"]) in maps.read_text()
    found.case.image[:] = 7  # a private copy: the file stays as it is
    assert load(first.paths["north", "case 000"]).case.image.max() < 7


def test_git_ignores_the_cache(tmp_path: Path) -> None:
    entries, cache = make(tmp_path / "data", 1), Cache(tmp_path / "cache")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    prepare_cases(cache, entries, federation(), jobs=1)
    shown = subprocess.run(["git", "-C", str(tmp_path), "status", "--short"], capture_output=True, text=True)

    assert shown.stdout == "?? data/\n"


def test_a_folder_with_files_of_the_users_is_not_hidden_from_git(tmp_path: Path) -> None:
    entries = make(tmp_path / "data", 1)
    prepare_cases(Cache(tmp_path / "data"), entries, federation(), jobs=1)

    assert not (tmp_path / "data" / ".gitignore").exists()


def test_the_metadata_of_a_prepared_file(tmp_path: Path) -> None:
    entries = make(tmp_path / "data", 1)
    path = prepare_cases(Cache(tmp_path / "cache"), entries, federation(), jobs=1).paths["north", "case 000"]
    found = load(path)
    assert found.case.name == "case 000" and found.case.spacing == (1.5, 1.5)
    assert found.metadata["client"] == "north" and found.metadata["sources"] == [
        "case 000.png",
        "case 000-label.png",
    ]
    assert found.metadata["num_voxels"] == {"1": int(found.case.label.sum())}
    assert set(map(tuple, found.foreground[1].tolist())) == set(
        map(tuple, found.case.label.nonzero().tolist())
    )
    assert invert_label(found.case.label, found.metadata["geometry"]).shape == (24, 24)
    assert json.loads((path.parents[1] / "settings.json").read_text())["prepare"]["size"] == [16, 16]


def test_large_classes_keep_a_seeded_sample_of_their_voxels(tmp_path: Path) -> None:
    label = np.ones((60, 60), np.uint8)
    label[0] = 2
    drawn = [dict(cache_module.sample_foreground(label, np.random.default_rng(3))) for _ in range(2)]
    assert drawn[0][1][0] == 59 * 60 and drawn[0][2][0] == 60
    assert drawn[0][1][1].shape == (2000, 2) and len(np.unique(drawn[0][1][1], axis=0)) == 2000
    assert np.array_equal(drawn[0][1][1], drawn[1][1][1])
    assert (label[tuple(drawn[0][1][1].T)] == 1).all()


def test_an_unlabelled_case_has_no_label(tmp_path: Path) -> None:
    entry = make(tmp_path / "data", 1)[0]
    bare = Entry(entry.client, entry.name, entry.images, None, entry.group)
    path = prepare_cases(Cache(tmp_path / "cache"), [bare], federation(), jobs=1).paths["north", "case 000"]
    found = load(path)
    assert not found.metadata["has_label"] and found.case.label.numel() == 0 and not found.foreground


def test_a_changed_setting_is_noticed_and_changing_back_finds_the_old(tmp_path: Path) -> None:
    entries, cache = make(tmp_path / "data", 1), Cache(tmp_path / "cache")
    place = ("north", "case 000")
    old = prepare_cases(cache, entries, federation(), jobs=1).paths[place]
    new = prepare_cases(cache, entries, federation(normalise="minmax"), jobs=1).paths[place]
    assert old != new and load(new).case.image.min() == 0
    before = files_under(cache.folder)
    assert prepare_cases(cache, entries, federation(), jobs=1).paths[place] == old
    assert files_under(cache.folder) == before
    other = federation().model_copy(update={"labels": {"other": (1,), "lesion": (255,)}})
    assert load(prepare_cases(cache, entries, other, jobs=1).paths[place]).case.label.max() == 2


def test_a_changed_file_is_noticed_even_if_its_time_and_size_are_not(tmp_path: Path) -> None:
    entries, cache = make(tmp_path / "data", 1), Cache(tmp_path / "cache")
    place = ("north", "case 000")
    old = prepare_cases(cache, entries, federation(), jobs=1).paths[place]
    picture = entries[0].images[0]
    times = picture.stat().st_atime_ns, picture.stat().st_mtime_ns
    Image.fromarray(np.full((24, 24), 9, np.uint8)).save(picture)
    os.utime(picture, ns=times)  # as a copying tool would
    new = prepare_cases(cache, entries, federation(), jobs=1).paths[place]
    assert new != old and not load(new).case.image.any()


def test_a_touched_file_is_hashed_again_but_not_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, cache = make(tmp_path / "data", 2), Cache(tmp_path / "cache")
    prepare_cases(cache, entries, federation(), jobs=1)
    before = files_under(cache.folder)
    monkeypatch.setattr(cache_module, "read_image", None)  # would fail
    hashed: list[Path] = []
    hash_file = cache_module.hash_file
    monkeypatch.setattr(cache_module, "hash_file", lambda path: hashed.append(path) or hash_file(path))
    entries[0].images[0].touch()
    assert whole(prepare_cases(cache, entries, federation(), jobs=1), entries)
    assert files_under(cache.folder) == before and set(hashed) == {entries[0].images[0], entries[0].label}


def test_bad_cases_are_listed_and_the_others_prepared(tmp_path: Path) -> None:
    entries, cache = make(tmp_path / "data", 5), Cache(tmp_path / "cache")
    entries[0].images[0].write_bytes(b"")
    entries[1].images[0].unlink()
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(entries[2].label)
    Image.fromarray(np.full((24, 24), 3, np.uint8)).save(entries[3].label)
    outcome = prepare_cases(cache, entries, federation(), jobs=1)
    reasons = {case: reason for _, case, reason in outcome.failures}
    assert list(outcome.paths) == [("north", "case 004")]
    for case, word in enumerate(("empty (0 bytes)", "does not exist", "label is 9x9", "value 3")):
        assert word in reasons[f"case {case:03d}"] and reasons[f"case {case:03d}"].endswith(".")


def test_values_of_no_class_are_background_only_where_allowed(tmp_path: Path) -> None:
    entries, cache = make(tmp_path / "data", 1), Cache(tmp_path / "cache")
    mask = np.zeros((24, 24), np.uint8)
    mask[:9], mask[12:] = 255, 7
    Image.fromarray(mask).save(entries[0].label)
    for allowed in ({7}, None):
        path = prepare_cases(cache, entries, federation(), jobs=1, background=allowed).paths[
            "north", "case 000"
        ]
        assert load(path).metadata["others"] == [7] and load(path).case.label.unique().tolist() == [0, 1]
    refused = prepare_cases(cache, entries, federation(), jobs=1)  # though it is there
    assert not refused.paths and "value 7" in refused.failures[0][2]


def test_an_unexpected_error_is_a_failure_of_its_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise ZeroDivisionError("oh")

    entries, cache = make(tmp_path / "data", 2), Cache(tmp_path / "cache")
    monkeypatch.setattr(cache_module, "prepare_case", broken)
    outcome = prepare_cases(cache, entries, federation(), jobs=1)
    assert [reason for _, _, reason in outcome.failures] == [
        f"client 'north', case 'case {n:03d}': it could not be prepared (ZeroDivisionError: oh)."
        for n in range(2)
    ]


def test_labelled_voxels_that_a_size_cuts_off_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries, cache = make(tmp_path / "data", 3), Cache(tmp_path / "cache")
    small = federation(spacing=(1.0, 1.0), size=(12, 12))
    outcome = prepare_cases(cache, entries, small, jobs=1)
    assert outcome.cut[("north", "case 000")] == pytest.approx(1 - 6 * 2 / 32)
    assert [record.getMessage() for record in caplog.records] == [
        "3 cases lose labelled voxels, the most client 'north', case 'case 000': "
        "prepare.size cuts off 62 % of what is labelled; raise it."
    ]
    assert not prepare_cases(cache, entries, federation(spacing=(1.0, 1.0), size=(24, 24)), jobs=1).cut


def test_a_helper_reports_what_was_cut_off(tmp_path: Path) -> None:
    entries = make(tmp_path / "data", 1)
    cache = Cache(tmp_path / "cache")
    recipe = cache_module.Recipe(federation(spacing=(1.0, 1.0), size=(12, 12)).prepare, {"lesion": (255,)})
    cache.open(recipe)
    answer = json.loads(json.dumps(vars(preparing.attempt(cache, entries[0], recipe))))
    assert answer["cut"] == pytest.approx(0.625)


def test_a_picture_of_an_older_format_is_prepared_again_upright(tmp_path: Path) -> None:
    """Folders of the first format hold pictures as they lie in their files; they are not used."""
    assert cache_module.FORMAT >= 2
    entries, cache = make(tmp_path / "data", 1), Cache(tmp_path / "cache")
    upright = np.zeros((24, 16), np.uint8)
    upright[:8, :8] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(upright)).save(entries[0].images[0], exif=exif)
    Image.fromarray(upright).save(entries[0].label)
    found = load(prepare_cases(cache, entries, federation(size=None), jobs=1).paths["north", "case 000"])
    assert torch.equal(found.case.image[0] > 0, found.case.label > 0)
    assert np.array_equal(invert_label(found.case.label, found.metadata["geometry"]), upright > 0)


def test_settings_that_cannot_be_are_refused_before_any_case(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="window"):
        prepare_cases(Cache(tmp_path / "cache"), [], federation(normalise="window"))
    assert not (tmp_path / "cache").exists()


# Names


def test_hostile_names_stay_inside_the_cache(tmp_path: Path) -> None:
    names = ["../../evil", "/etc/passwd", "..", ".", "a/b", "é ü", "x" * 300, "a\nb", "con\\x"]
    plain = make(tmp_path / "data", 1)[0]
    entries = [Entry(name, name, plain.images, plain.label, name) for name in names]
    inside = tmp_path / "deep" / "er" / "cache"
    inside.parent.mkdir(parents=True)
    before = sorted(path for path in tmp_path.rglob("*"))
    outcome = prepare_cases(Cache(inside), entries, federation(), jobs=1)
    assert whole(outcome, entries) and len(set(outcome.paths.values())) == len(names)
    assert sorted(path for path in tmp_path.rglob("*") if inside not in (path, *path.parents)) == before
    assert all(path.resolve().is_relative_to(inside.resolve()) for path in outcome.paths.values())
    assert {load(path).case.name for path in outcome.paths.values()} == set(names)


# Folders that cannot be written


def test_an_unwritable_folder_is_a_sentence(tmp_path: Path) -> None:
    entries = make(tmp_path / "data", 2)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="cache folder .*file.* cannot be written: .*federation.yaml"):
        prepare_cases(Cache(tmp_path / "file"), entries, federation(), jobs=1)
    with pytest.raises(DataError, match="cannot be written"):
        prepare_cases(Cache(Path("/proc/nowhere")), entries, federation(), jobs=1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_sentence_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, cache = make(tmp_path / "data", 3), Cache(tmp_path / "cache")
    prepare_cases(cache, entries[:1], federation(), jobs=1)
    real = os.fsync

    def full(number: int) -> None:
        with Path("/dev/full").open("wb", buffering=0) as device:
            device.write(b"x")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left on device\. Free some space"):
        prepare_cases(cache, entries, federation(), jobs=1)
    assert not list(cache.folder.rglob("*.partial"))
    monkeypatch.setattr(os, "fsync", real)
    assert whole(prepare_cases(cache, entries, federation(), jobs=1), entries)


# Broken and stale files


@pytest.mark.parametrize("keep", [0, 7, 40, 500, -1])
def test_a_truncated_file_is_noticed_and_made_again(tmp_path: Path, keep: int) -> None:
    entries, cache = make(tmp_path / "data", 2), Cache(tmp_path / "cache")
    path = prepare_cases(cache, entries, federation(), jobs=1).paths["north", "case 001"]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="not a complete prepared case"):
        load(path)
    assert whole(prepare_cases(cache, entries, federation(), jobs=1), entries)


def test_another_kind_of_file_in_its_place_is_made_again(tmp_path: Path) -> None:
    entries, cache = make(tmp_path / "data", 1), Cache(tmp_path / "cache")
    path = prepare_cases(cache, entries, federation(), jobs=1).paths["north", "case 000"]
    from safetensors.torch import save_file

    save_file({"image": torch.zeros(3)}, path)
    with pytest.raises(DataError, match="not a prepared case of wardround"):
        load(path)
    assert whole(prepare_cases(cache, entries, federation(), jobs=1), entries)


def test_half_files_of_dead_processes_are_swept_and_those_of_living_ones_left(tmp_path: Path) -> None:
    entries, cache = make(tmp_path / "data", 1), Cache(tmp_path / "cache")
    home = prepare_cases(cache, entries, federation(), jobs=1).paths["north", "case 000"].parent
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = cache_module.socket.gethostname()
    dead, alive = home / f".{ended.pid}-aa-{host}.partial", home / f".{os.getpid()}-aa-{host}.partial"
    far, ancient = home / f".{ended.pid}-aa-elsewhere.partial", home / ".1-aa-elsewhere.partial"
    for path in (dead, alive, far, ancient):
        path.touch()
    os.utime(ancient, (0, 0))
    prepare_cases(cache, entries, federation(), jobs=1)
    assert [path.exists() for path in (dead, alive, far, ancient)] == [False, True, True, False]


def test_a_broken_index_only_costs_time(tmp_path: Path) -> None:
    entries, cache = make(tmp_path / "data", 2), Cache(tmp_path / "cache")
    first = prepare_cases(cache, entries, federation(), jobs=1)
    (cache.folder / "files.jsonl").write_bytes(b'["half a li\n\xff\xfe\n[1]\n{}\n3\n')
    assert prepare_cases(cache, entries, federation(), jobs=1) == first


# Several processes


def test_helpers_do_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes do not depend on who prepared a case; helpers are given the time to take some."""
    entries = make(tmp_path / "dätä", 12)
    entries[3].images[0].write_text("broken")
    alone = prepare_cases(Cache(tmp_path / "alone"), entries, federation(), jobs=1)
    monkeypatch.setattr(preparing, "PATIENCE", 0.0)
    workers: set[int] = set()
    mine = preparing.attempt

    def slow(*args: object) -> preparing.Attempt:
        time.sleep(0.4)
        return mine(*args)

    monkeypatch.setattr(preparing, "attempt", slow)
    launched = preparing.Helper._launched

    def watched(self: preparing.Helper) -> object:
        workers.add(id(self))
        return launched(self)

    monkeypatch.setattr(preparing.Helper, "_launched", watched)
    together = prepare_cases(Cache(tmp_path / "together"), entries, federation(), jobs=2)
    assert len(workers) == 1
    assert together.failures == alone.failures and len(alone.failures) == 1
    for place, path in alone.paths.items():
        assert path.read_bytes() == together.paths[place].read_bytes()


def test_a_helper_that_cannot_start_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "PATIENCE", 0.0)
    monkeypatch.setattr(
        preparing,
        "helper_environment",
        lambda: {**os.environ, "PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"},
    )
    entries = make(tmp_path / "data", 6)
    assert whole(prepare_cases(Cache(tmp_path / "cache"), entries, federation(), jobs=3), entries)


KILLS = """
import json, os, signal, sys, time
from pathlib import Path
from wardround.data.preparing import cache as cache_module
from wardround.data.preparing.cache import Cache
from wardround.data.federation_file import FederationFile
from wardround.data.preparing.pool import entry_again, prepare_cases

entries, file, folder = json.load(sys.stdin)
entries, file, cache = [entry_again(e) for e in entries], FederationFile.model_validate(file), Cache(Path(folder))
tensor_parts = cache_module.tensor_parts
def slowly(*args):
    for part in tensor_parts(*args):
        yield part
        time.sleep(0.005)  # so that a kill finds half a file
cache_module.tensor_parts = slowly

def child():
    pid = os.fork()
    if pid == 0:
        outcome = prepare_cases(cache, entries, file, jobs=1)
        os._exit(0 if len(outcome.paths) == len(entries) else 1)
    return pid

def half_files():
    return list(cache.folder.rglob("*.partial"))

def kill(pid, delay):
    end = time.time() + 10
    while not half_files() and time.time() < end:
        time.sleep(0.0005)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

halves = 0
for attempt in range(4):
    kill(child(), attempt * 0.002)
    halves += len(half_files())
    for path in half_files():
        path.unlink()
made = len(list(cache.folder.rglob("*.safetensors")))
both = [child(), child()]
kill(child(), 0)
print(json.dumps([halves, made, [os.waitpid(pid, 0)[1] for pid in both]]))
"""


def test_what_killed_processes_left_is_removed_and_what_live_ones_write_stays(tmp_path: Path) -> None:
    entries, cache = make(tmp_path / "data", 1), Cache(tmp_path / "cache")
    prepare_cases(cache, entries, federation(), jobs=1)
    home = next(cache.folder.glob("*/settings.json")).parent
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, live = (home / f".settings.json.{pid}-7.partial" for pid in (ended.pid, os.getpid()))
    left.touch(), live.touch()
    prepare_cases(cache, entries, federation(), jobs=1)
    assert live.exists() and not left.exists()


def test_kill_9_at_any_time_and_two_runs_at_once(tmp_path: Path) -> None:
    entries, cache = make(tmp_path / "data", 16), Cache(tmp_path / "cache")
    plain = [preparing.plain_entry(entry) for entry in entries]
    task = json.dumps([plain, federation().model_dump(mode="json"), str(cache.folder)])
    command = [sys.executable, "-W", "ignore", "-c", KILLS]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    ended = subprocess.run(command, input=task, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    halves, made, both = json.loads(ended.stdout)
    assert halves > 0 and made < 16  # the kills did find it at work
    assert both == [0, 0]
    before = files_under(cache.folder)
    assert len(before) == 16 and whole(prepare_cases(cache, entries, federation(), jobs=1), entries)
    assert files_under(cache.folder) == before  # all of it was there
    assert not list(cache.folder.rglob("*.partial"))
