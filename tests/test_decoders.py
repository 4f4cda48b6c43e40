"""Every decoder of local files, fed with mutations of valid ones: a sentence of ours, or it reads it.

Mutations are the same in every run. A hundred of each decoder are quick; `make slow` does 10,000, and 100,000 is

    FUZZ_TRIES=100000 pytest -n 0 -s -m slow tests/test_decoders.py --basetemp=/dev/shm/fuzz

which takes about half an hour of one core, where files are in memory, and says what each decoder took. A try may
take a second of the process's own time, so that other programs on the machine raise no alarm; the longest by the
clock is said beside it. What comes over the network has its own: `deploy/real/fuzz.py`.
"""

import json
import os
import random
import resource
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from helpers import config, run, settings
from pytest import TempPathFactory, fixture, importorskip, mark

from wardround.config_file import load_config
from wardround.configuring.plan_file import read_record
from wardround.data.federation_file import FederationFile, Source
from wardround.data.federation_file import load as load_federation
from wardround.data.federation_file import write as write_federation
from wardround.data.preparing.record import Preparation
from wardround.data.readers import metaimage, nrrd
from wardround.data.splits import read_splits
from wardround.deploy.kits.kit import read_kit
from wardround.deploy.kits.project import Project, load_project
from wardround.deploy.kits.project import render_template as render_project
from wardround.deploy.ledger.verifying import read as read_ledger
from wardround.deploy.ledger.verifying import verify
from wardround.deploy.ledger.writing import Ledger
from wardround.deploy.live_file import Live, read_live
from wardround.deploy.site_file import load_site
from wardround.deploy.site_file import render_template as render_site
from wardround.deploy.survey.proposals import HospitalProposal, ProposalFolder
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.checksums import hash_json, seal
from wardround.engine.memory_file import load_memory, save_memory
from wardround.engine.networks import network_for
from wardround.engine.records import read_lines
from wardround.engine.run_folder import RunFolder
from wardround.errors import WardroundError
from wardround.exporting.exports import export
from wardround.exporting.package import opened as open_package
from wardround.messages import Message
from wardround.params import Params
from wardround.prediction.trained import read_calibration
from wardround.privacy.budget import PrivacyBudget
from wardround.storage import StoredTensors
from wardround.yaml_file import PlainLoader

QUICK, MANY = 100, int(os.environ.get("FUZZ_TRIES", "10000"))
SECONDS, GROWTH = 1.0, 64 * 2**10  # of one try; KiB of memory beyond what the process had before
DEEP = 3000  # levels, beyond what Python follows

VALUES: list[Any] = [
    None, True, False, -1, 0, 3, 2**63, 10**400, 1e308, -0.5, float("nan"), float("inf"), "", "x", "nan",
    "..", "/etc/passwd", "\x00", "\ud800", "x" * 5000, [], {}, [[]], [None], {"a": {"a": {}}}, [1, "x", None],
    {"kind": "params"}, [0, 2**40], [2**62] * 3, "[" * DEEP, {"": ""}, "1e3", "0x10", "2026-01-01", b"x",
]  # fmt: skip


class Mutator:
    """Mutations of bytes and of what JSON, YAML and tensor files hold, by a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def bytes(self, content: bytes) -> bytes:
        """Bits flipped; pieces cut, doubled, put in and swapped; or nothing but chance."""
        draw, place = self.draw, self.draw.randrange(len(content) + 1)
        length = draw.choice([1, 1, 4, 30])
        match draw.randrange(8):
            case 0:
                return draw.randbytes(draw.choice([0, 1, 7, 9, 300]))
            case 1:
                return content[:place]
            case 2:
                return content[:place] + draw.randbytes(length) + content[place:]
            case 3:
                return content[:place] + content[place + length :]
            case 4:
                return content[:place] + content[place : place + length] * 2 + content[place + length :]
            case 5:
                return content[:place] + draw.choice(
                    [b"[" * DEEP, b"{", b"}", b"- ", b": ", b"&a *a", b"!!x "]
                )
            case _:
                spoilt = bytearray(content)
                for _ in range(draw.randint(1, 8) if spoilt else 0):
                    spoilt[draw.randrange(min(len(spoilt), 4000))] ^= 1 << draw.randrange(8)
                return bytes(spoilt)

    def tree(self, value: Any) -> Any:
        """One or two members of a nested value replaced, removed, renamed or doubled."""
        for _ in range(self.draw.randint(1, 2)):
            value = self.member(value)
        return value

    def member(self, value: Any) -> Any:
        draw = self.draw
        inner = (
            list(value)
            if isinstance(value, dict)
            else list(range(len(value)))
            if isinstance(value, list)
            else []
        )
        if not inner or draw.random() < 0.15:
            return draw.choice([value, draw.choice(VALUES), [value], {"x": value}, str(value)])
        key = draw.choice(inner)
        if draw.random() < 0.6:
            found = self.member(value[key])
            return (
                {**value, key: found} if isinstance(value, dict) else [*value[:key], found, *value[key + 1 :]]
            )
        without = (
            {k: v for k, v in value.items() if k != key}
            if isinstance(value, dict)
            else value[:key] + value[key + 1 :]
        )
        if draw.random() < 0.5:
            return without
        new = draw.choice(VALUES)
        return {**without, str(new)[:50]: value[key]} if isinstance(value, dict) else [*without, new, new]

    def json(self, content: bytes) -> bytes:
        """A JSON file, its checksum mended where it has one."""
        if self.draw.random() < 0.3:
            return self.bytes(content)
        found = self.tree(json.loads(content))
        if isinstance(found, dict) and "sha256" in found and self.draw.random() < 0.8:
            found.pop("sha256")
            found["sha256"] = hash_json(plain(found))
        return as_json(found)

    def lines(self, content: bytes) -> bytes:
        """A file of JSON lines, one of them changed."""
        lines = content.splitlines()
        place = self.draw.randrange(len(lines))
        lines[place] = self.json(lines[place])
        return b"\n".join(lines) + b"\n"

    def yaml(self, content: bytes) -> bytes:
        if self.draw.random() < 0.3:
            return self.bytes(content)
        found = self.tree(parse_yaml(content))
        return (
            as_json(found) if self.draw.random() < 0.5 else yaml.safe_dump(found).encode("utf-8", "replace")
        )

    def tensors(self, content: bytes) -> bytes:
        """A safetensors file: its header changed, also inside the JSON texts that it holds."""
        if self.draw.random() < 0.3:
            return self.bytes(content)
        (length,) = struct.unpack("<Q", content[:8])
        header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
        texts = header.get("__metadata__", {})
        inner = [key for key, text in texts.items() if text[:1] in ("{", "[")]
        if inner and self.draw.random() < 0.6:
            key = self.draw.choice(inner)
            texts[key] = as_json(self.tree(json.loads(texts[key]))).decode()
        else:
            header = self.tree(header)
        text = as_json(header)
        first = struct.pack("<Q", len(text)) + text
        return b"".join(seal([first, rest])[0]) if b'"sha256"' in first[:40] else first + rest

    def text(self, content: bytes) -> bytes:
        """Lines of `key: value` changed: the headers of scans."""
        head, end, rest = content.partition(b"\n\n")
        lines = (head if end else content).split(b"\n")
        place = self.draw.randrange(len(lines))
        key, sign, _ = lines[place].partition(self.draw.choice([b":", b"="]))
        value = str(self.draw.choice(VALUES)).encode("utf-8", "replace")
        lines[place] = key + sign + b" " + value if self.draw.random() < 0.8 else b""
        return self.bytes(content) if self.draw.random() < 0.4 else b"\n".join(lines) + end + rest


@cache
def parse_yaml(content: bytes) -> Any:
    """Once for all tries: mutations leave it as it is."""
    return yaml.load(content, Loader=PlainLoader)  # noqa: S506


def as_json(value: Any) -> bytes:
    return json.dumps(plain(value), default=str).encode("utf-8", "replace")


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


@dataclass(frozen=True)
class Decoder:
    """file: which of the folder's is changed; how: the mutation that knows its format; read: the decoder."""

    file: str
    how: Callable[[Mutator, bytes], bytes]
    read: Callable[[Path], Any]


def read_all(found: Any) -> None:
    """Every tensor of a mapping or message."""
    groups = found.tensors().values() if isinstance(found, Message) else [found]
    for group in groups:
        for name in group:
            group[name].sum()


def read_checkpoints(folder: Path) -> None:
    found = Checkpoints(folder / "run/checkpoints")
    found.kept()
    found.rewinds()
    found.check()
    facts, _, _ = found.load()
    if facts.get("best_file") is not None:
        found.load_best(facts["best_file"])


def read_outcome(folder: Path) -> None:
    RunFolder(config(folder / "run")).load_outcome()


def read_preparation(folder: Path) -> None:
    network_for(config(folder / "run"), Preparation.load(folder / "run/preparation.json"))


def read_package(folder: Path) -> None:
    open_package(folder / "package/model.json", folder / "package/model.safetensors")


def read_signing_request(folder: Path) -> None:
    from wardround.deploy.kits.enrolment import REQUEST, read_letter, read_request

    path = folder / SIGNING
    read_request(path, read_letter(path, REQUEST, "csr", "project_id"))


def read_revoked(folder: Path) -> None:
    from wardround.deploy.kits.revocation import read_list

    read_list(folder / REVOKED, folder / "organiser/keys/authority.crt")


def check_kit(folder: Path) -> None:
    from wardround.deploy.preflight.kit import refuse_broken

    refuse_broken(read_kit(folder / "north"))


RUN, SIGNING, REVOKED = "run/", "south.request.json", "organiser/state/revoked.crl"
PROPOSAL = HospitalProposal(
    classes={"lesion": "Lesion"}, channels={"ct": "CT"}, prepare={"spacing": [1, 1, 1]}
)
DECODERS = {
    "tensors": Decoder(
        "message.safetensors", Mutator.tensors, lambda f: read_all(StoredTensors(f / "message.safetensors"))
    ),
    "message": Decoder(
        "message.safetensors", Mutator.tensors, lambda f: read_all(Message.load(f / "message.safetensors"))
    ),
    "memory": Decoder("memory.safetensors", Mutator.tensors, lambda f: load_memory(f / "memory.safetensors")),
    "checkpoint": Decoder(RUN + "checkpoints/latest.json", Mutator.json, read_checkpoints),
    "checkpoint of a round": Decoder(RUN + "checkpoints/round-00002.json", Mutator.json, read_checkpoints),
    "state": Decoder(RUN + "checkpoints/round-00002.safetensors", Mutator.tensors, read_checkpoints),
    "rewinds": Decoder(RUN + "checkpoints/rewinds.json", Mutator.json, read_checkpoints),
    "records": Decoder(RUN + "records.jsonl", Mutator.lines, lambda f: read_lines(f / "run/records.jsonl")),
    "result": Decoder(RUN + "result.json", Mutator.json, read_outcome),
    "preparation": Decoder(RUN + "preparation.json", Mutator.json, read_preparation),
    "calibration": Decoder(RUN + "calibration.json", Mutator.json, lambda f: read_calibration(f / "run")),
    "live view": Decoder(RUN + "live.json", Mutator.json, lambda f: read_live(f / "run")),
    "configuration": Decoder("run.yaml", Mutator.yaml, lambda f: load_config(f / "run.yaml")),
    "federation": Decoder("federation.yaml", Mutator.yaml, lambda f: load_federation(f / "federation.yaml")),
    "splits": Decoder("splits.json", Mutator.json, lambda f: read_splits(f / "splits.json")),
    "site": Decoder("site.yaml", Mutator.yaml, lambda f: load_site(f / "site.yaml")),
    "project": Decoder("project.yaml", Mutator.yaml, lambda f: load_project(f / "project.yaml")),
    "plan": Decoder("plan.yaml", Mutator.yaml, read_record),
    "kit": Decoder("north/kit.json", Mutator.json, check_kit),
    "manifest": Decoder("north/manifest.json", Mutator.json, check_kit),
    "certificate": Decoder("north/keys/own.crt", Mutator.bytes, check_kit),
    "key": Decoder("north/keys/own.key", Mutator.bytes, check_kit),
    "authority": Decoder("north/keys/authority.crt", Mutator.bytes, check_kit),
    "ledger": Decoder(
        "ledger.jsonl",
        Mutator.lines,
        lambda f: (list(read_ledger(f / "ledger.jsonl")), verify(f / "ledger.jsonl")),
    ),
    "budget": Decoder("privacy.jsonl", Mutator.lines, lambda f: PrivacyBudget(f / "privacy.jsonl").read()),
    "proposal": Decoder(
        f"proposals/{PROPOSAL.key}.json", Mutator.json, lambda f: ProposalFolder(f).find(PROPOSAL.key)
    ),
    "package": Decoder("package/model.json", Mutator.json, read_package),
    "signing request": Decoder(SIGNING, Mutator.json, read_signing_request),
    "revocations": Decoder(REVOKED, Mutator.bytes, read_revoked),
    "NRRD": Decoder("scan.nrrd", Mutator.text, lambda f: nrrd.load(f / "scan.nrrd", False)),
    "MetaImage": Decoder("scan.mha", Mutator.text, lambda f: metaimage.load(f / "scan.mha")),
}


@fixture(scope="session")
def valid(tmp_path_factory: TempPathFactory) -> Path:
    """One valid file of each kind."""
    importorskip("cryptography")
    from wardround.deploy.kits.enrolment import request_certificate, revoke
    from wardround.deploy.kits.provisioning import provision

    folder = tmp_path_factory.mktemp("valid")
    run(folder / "run", evaluate={"metrics": ["dice"], "overlays": 0, "model": "best"})
    Checkpoints(folder / "run/checkpoints").add_rewind(2)
    Live(folder / "run/live.json", job="a", rounds=2).say(state="done")
    (folder / "run.yaml").write_text(yaml.safe_dump(settings(folder / "run")))
    params = Params({"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)})
    Message(params, {"control": params}, {"a": 1.5, "b": [1, "x"]}).save(folder / "message.safetensors")
    save_memory(folder / "memory.safetensors", {"own": params, "count": 2, "more": [{"t": params["w"]}]})
    federation = FederationFile(sources=(Source(path=Path("scans")),), labels={"lesion": (1,)})
    write_federation(federation, folder / "federation.yaml", overwrite=True)
    (folder / "splits.json").write_text('{"north": {"train": ["a", "b"], "val": ["c"], "test": ["d"]}}')
    (folder / "site.yaml").write_text(render_site("north"))
    (folder / "project.yaml").write_text(render_project())
    plan = {"choices": [{"setting": "rounds", "value": 3, "reason": "short"}], "warnings": ["few cases"]}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    project = {
        "project": "demo",
        "organiser": {"host": "localhost", "port": 8002},
        "hospitals": ["north", "south"],
    }
    provision(Project.model_validate(project), folder, bind="127.0.0.1")
    request_certificate(read_kit(folder / "south"))
    revoke(folder, "south")
    ProposalFolder(folder).decide(PROPOSAL, "accepted")
    export(folder / "run", "torch", folder / "package")
    charged = {"time": "2026-01-01", "run": "a", "round": 1, "level": "client"}
    lines = [json.dumps({**charged, "noise": 1.5, "rate": 0.1, "steps": steps}) + "\n" for steps in (1, 2)]
    (folder / "privacy.jsonl").write_text("".join(lines))
    ledger = Ledger(folder / "ledger.jsonl")
    for number in range(3):
        ledger.add({"run": "a", "round": number, "task": "train", "tensors": {"w": [2]}, "bytes": 8})
    values = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    (folder / "scan.nrrd").write_bytes(nrrd.encode(values, np.eye(4)))
    (folder / "scan.mha").write_bytes(metaimage.encode(values, np.eye(4)))
    return folder


def peak() -> int:
    """KiB of memory that this process had at most since the last call, where the system can tell; else ever."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        Path("/proc/self/clear_refs").write_text("5")  # begins anew with what it has now
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def fuzz(decoder: Decoder, folder: Path, tries: int) -> list[str]:
    """What went wrong: exceptions that are not ours, tries that took long, memory that grew."""
    path = folder / decoder.file
    content = path.read_bytes()
    decoder.read(folder)  # the valid file is read
    mutator, wrong, longest = Mutator(7), Counter[str](), (0.0, 0.0)
    start = time.process_time()
    peak()
    before = peak()
    for _ in range(tries):
        path.write_bytes(decoder.how(mutator, content))
        began = time.process_time(), time.perf_counter()
        try:
            decoder.read(folder)
        except WardroundError:
            pass
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            ours = [
                step for step in traceback.extract_tb(error.__traceback__) if "wardround" in step.filename
            ]
            place = ours[-1] if ours else place
            wrong[f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno} {place.name}"] += 1
        seconds = time.process_time() - began[0]
        longest = max(longest[0], seconds), max(longest[1], time.perf_counter() - began[1])
        if seconds > SECONDS:
            wrong["more than a second"] += 1
    path.write_bytes(content)
    grown = peak() - before
    print(  # noqa: T201  # seen with -s
        f"\n{decoder.file}, {decoder.read.__name__}: {tries:,} tries in {time.process_time() - start:.1f} s, the "
        f"longest {longest[0]:.3f} s ({longest[1]:.3f} s by the clock), {grown:,} KiB more, {dict(wrong)}"
    )
    return [f"{count} x {what}" for what, count in wrong.items()] + (
        [f"{grown} KiB more"] if grown > GROWTH else []
    )


@mark.parametrize("name", DECODERS)
def test_a_damaged_file_is_refused_in_a_sentence(name: str, valid: Path) -> None:
    assert fuzz(DECODERS[name], valid, QUICK) == []


@mark.slow
@mark.parametrize("name", DECODERS)
def test_many_damaged_files_are_refused_in_a_sentence(name: str, valid: Path) -> None:
    assert fuzz(DECODERS[name], valid, MANY) == []
