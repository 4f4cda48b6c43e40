"""Attacks with valid certificates and without: each refused, logged with the sender's name, and without effect.

    python tests/deploy/real/attacks.py [--only hospital,connections,organiser,local,kits] [--keep]

hospital: from a hospital with a valid kit, while four others train; connections: thousands of them;
organiser: a modified server that speaks to a real `wardround join`; local: a process without a certificate;
kits: with added files and links. About five minutes. The run beside the attacks must end with the SHA-256
that `wardround train` gives.
"""

from __future__ import annotations

import logging
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
from common import (
    Beside,
    Checks,
    Deployment,
    fingerprint,
    records,
    settings,
    since,
    trained,
    until,
)
from hostile import Caller, Said, connect_tls
from organiser_attacks import attack_as_organiser
from parcels import HOSTILE_REPLIES, Bomb, as_file, compress_zeros, find_request
from stage import NAMES, ROGUE, SECONDS, LogTail, Stage

from wardround.deploy import limits
from wardround.deploy.rpc.service import INSTANCE, METHODS, SERVICE, encode
from wardround.deploy.site import Site
from wardround.deploy.site_file import SiteFile

# names of channels, topics and commands in FLARE 2.9
TOPICS = """
_commands _logout _net_manager abort abort_all abort_app abort_job abort_task ack add_study_site
add_study_user admin admin_check_status app_command aux aux_command aux_communicate aux_communication
aux_send bcast blob bulk_item bulk_test bye call cat cell_info cellnet.channel cells cert_login challenge
change_root check_job check_resources check_status client_command client_sub_worker_command clone_job cmd
comm_config comp_caller.call config_vars configure_job_log configure_site_log conns control.do_command
data delete_job delete_run delete_workspace deploy deploy_app disable_client download download_job
download_job_components echo edge_request enable_client end_run execute_result file file_stream
fire_event fire_forget folder get_clients get_errors get_job_log get_job_meta get_run_info get_task grep
handle_dead_job hci.download hci.upload hci_channel head heart_beat heartbeat heartbeat_cell
info.reset_errors info.show_errors info.show_stats job_failure list_job list_jobs list_pools
list_sessions list_studies login ls msg_stats multi_process_executor object_dl peers ping process_info
pull_job push_folder pwd quit register register_study reload_decomposers remove_client remove_study
remove_study_site remove_study_user report_env report_job_failure report_resources report_root
report_version reset_errors resource_manager.report_resources restart return_only route routes
scheduler.allocate_resource scheduler.cancel_resource scheduler.check_resource server_command
server_parent_listener server_state set_timeout show_cells show_errors show_pool show_scopes show_stats
show_study shutdown simulator_runner simulator_worker_init sm__ACK sm__CERT sm__DATA sm__ERROR sm__STREAM
sm_cert sm_session speed speed_test start start_app start_route stop stop_cell stream stress submit_job
submit_result submit_update sync_runner sys.configure_site_log sys.info sys.report_env
sys.report_resources sys.report_version sys.shell sys.show_config sys_info tail task token_login
train.abort train.abort_task train.check_status train.configure_job_log train.delete_run train.deploy
train.get_scopes train.notify_job_status train.restart train.set_job_id train.shutdown train.start
train.start_job update_run_status upload_from_folder url_use
"""
FOREIGN = (
    "admin",
    "server_command",
    "client_command",
    "task",
    "cellnet.channel",
    "streaming",
    "aux_communication",
)
TRAVERSALS = [
    "../../kit.json",
    "/etc/passwd",
    "..",
    "../queue/x.json",
    "a/../../b",
    "..\\..\\x",
    "%2e%2e%2f",
    "north\x00",
]


# From a hospital with a valid kit


def attack_as_hospital(stage: Stage) -> None:
    with Caller(stage.rogue) as rogue:
        rogue.hello()
        call_foreign_methods(stage, rogue)
        answer_for_others(stage, rogue)
        send_code(stage, rogue)
        send_traversals(stage, rogue)
        send_too_much(stage, rogue)
        call_in_parallel(stage, rogue)
    join_twice(stage)
    answer_with_attacks(stage)


def call_foreign_methods(stage: Stage, rogue: Caller) -> None:
    paths = [f"/{service}/{topic}" for service in (SERVICE, *FOREIGN) for topic in TOPICS.split()]
    paths += [f"/{SERVICE}/{name.lower()}" for name in METHODS] + [
        "//",
        f"/{SERVICE}/",
        "/grpc.health.v1.Health/Check",
    ]
    with stage.attack("every method name of FLARE, in eight services", len(paths), "no method") as facts:
        body = encode({"topic": "sys.shell", "cmd": f"touch {stage.mark}", "REQUIRE_AUTHZ": "false"})
        said = Counter(rogue.call(path, body).code for path in paths)
        facts |= {"ok": said == {"UNIMPLEMENTED": len(paths)}, "refused": dict(said)}


def open_letter(stage: Stage) -> tuple[str, str]:
    """The job and an open letter of the run beside, which only its hospital should know."""
    exchange = stage.organiser.state / "exchange"
    path = until(lambda: next(exchange.glob("*/*.request"), None), 60, "a request is open")
    return path.parent.name, path.stem


def answer_for_others(stage: Stage, rogue: Caller) -> None:
    with stage.attack("messages that name another hospital", 0) as facts:
        named = dict.fromkeys(
            ("hospital", "to", "from", "origin", "destination", "client", "target"), "north"
        )
        _, found = rogue.stream("Wait", iter([encode({"held": [], **named})]), 3.0)
        beat = rogue.call("Beat", encode({**named, "alive": ["north"]}))
        facts |= {"ok": not found and beat.code == "OK", "requests_of_others": len(found)}
    with stage.attack("a reply to another hospital's request", 10, "foreign") as facts:
        said: Counter[str] = Counter()
        for _ in range(20):
            job, letter = open_letter(stage)
            said[rogue.answer({"job": job, "letter": letter}, b"x" * 100).code] += 1
        facts |= {"ok": said == {"NOT_FOUND": 20}, "refused": dict(said)}
    with stage.attack("1,000 guessed letters", 1000, "not wanted") as facts:
        job, _ = open_letter(stage)
        said = Counter(
            rogue.answer({"job": job, "letter": secrets.token_hex(16)}, b"x").code for _ in range(1000)
        )
        facts |= {"ok": said == {"NOT_FOUND": 1000}, "refused": dict(said)}


def send_code(stage: Stage, rogue: Caller) -> None:
    bomb = pickle.dumps(Bomb(stage.mark))
    with stage.attack("a pickle as every message", len(METHODS), "refused") as facts:
        said = {method: rogue.call(method, bomb, bomb).code for method in METHODS}
        facts |= {"ok": set(said.values()) == {"INVALID_ARGUMENT"}, "refused": dict(Counter(said.values()))}


def send_traversals(stage: Stage, rogue: Caller) -> None:
    with stage.attack(
        "paths in every field: job, letter, wardround, held, metadata", 3 * len(TRAVERSALS)
    ) as facts:
        said: Counter[str] = Counter()
        job, letter = open_letter(stage)
        for path in TRAVERSALS:
            said[rogue.answer({"job": path, "letter": letter}, b"x").code] += 1
            said[rogue.answer({"job": job, "letter": path}, b"x").code] += 1
            said[
                rogue.call("Answer", encode({"job": path, "letter": path, "bytes": path, "file": path})).code
            ] += 1
            rogue.call("Hello", encode({"wardround": path}))  # a version is only text
            rogue.call("Wait", encode({"held": [path]}), seconds=0.3)
            said[rogue.call("Beat", b"{}", metadata=((INSTANCE, path.replace("\x00", "")),)).code] += 1
        refused = {"NOT_FOUND", "INVALID_ARGUMENT", "FAILED_PRECONDITION"}
        facts |= {"ok": set(said) <= refused, "refused": dict(said)}


def send_too_much(stage: Stage, rogue: Caller) -> None:
    server = stage.server()
    before = server.memory_info().rss
    with stage.attack("metadata of 20 kB and 1 MB", 0) as facts:
        said = [
            rogue.call("Beat", b"{}", metadata=(*rogue.metadata, ("x", "a" * size))).code
            for size in (20_000, 10**6)
        ]
        facts |= {"ok": "OK" not in said, "refused": said}
    with stage.attack("messages of 2 MB and 64 MB", 0) as facts:
        said = [
            rogue.call(method, b" " * size).code for method in METHODS for size in (2 * 10**6, 64 * 10**6)
        ]
        facts |= {"ok": "OK" not in said, "refused": dict(Counter(said))}
    with (
        stage.attack("256 MB compressed to 250 kB", 0) as facts,
        Caller(stage.rogue, rogue.metadata[0][1], compression=grpc.Compression.Gzip) as bomber,
    ):
        said = [bomber.call(method, b" " * 2**28, seconds=30).code for method in ("Hello", "Answer")]
        grown = (server.memory_info().rss - before) / 2**20
        facts |= {"ok": "OK" not in said and grown < 100, "refused": said, "server_grew_mib": round(grown)}


def call_in_parallel(stage: Stage, rogue: Caller) -> None:
    with stage.attack("200 parallel calls", 150, "too many calls") as facts, ThreadPoolExecutor(200) as pool:
        callers = [Caller(stage.rogue, rogue.metadata[0][1]) for _ in range(20)]
        work = [
            pool.submit(callers[n % 20].call, "Wait", encode({"held": []}), seconds=4) for n in range(200)
        ]
        said = Counter(one.result().code for one in work)
        for caller in callers:
            caller.channel.close()
        admitted = said["OK"] + said["DEADLINE_EXCEEDED"]
        facts |= {
            "ok": admitted <= limits.CALLS_OF_ONE,
            "refused": dict(said),
            "threads": stage.server().num_threads(),
        }
    with stage.attack("350 calls that never send their message", 300, "too many calls") as facts:
        callers = [Caller(stage.rogue, rogue.metadata[0][1]) for _ in range(25)]
        calls = [caller.open_silently(METHODS[n % 4], 4) for caller in callers for n in range(14)]
        time.sleep(2)
        with Caller(stage.hospitals.kit("north"), "preflight") as other:
            said_other = other.hello()
        for call in calls:
            call.cancel()
        for caller in callers:
            caller.channel.close()
        facts |= {"ok": said_other.code == "OK", "another_hospitals_hello": said_other.code}
    with stage.attack("3,000 calls opened and cancelled at once", 0) as facts:
        for _ in range(3000):
            rogue.open_silently("Answer", 0.01).cancel()
        facts["ok"] = True


def join_twice(stage: Stage) -> None:
    """A second process with a copied kit: it must be refused, and the first go on."""
    hospitals = stage.hospitals
    first = hospitals.join(ROGUE)
    until(lambda: "connected to" in first.text, 60, "the first process connects")
    copy = Path(
        shutil.copytree(
            hospitals.kits / ROGUE, hospitals.folder / "copied", ignore=shutil.ignore_patterns("process.lock")
        )
    )
    with stage.attack("a second process with the same kit", 1, "in use") as facts:
        second = hospitals.start("copied", "join", copy)
        until(lambda: "refused: another process takes part" in second.text, 60, "the second is refused")
        until(lambda: "refused a second process" in first.text, 10, "the first is told")
        facts["ok"] = first.is_running
    second.kill()
    first.kill()


def answer_with_attacks(stage: Stage) -> None:
    """A run with two hospitals, one of which answers each round's request with another attack."""
    hospitals, checks = stage.hospitals, stage.checks
    rules = SiteFile.model_validate({"data": "phantom", "tasks": ["all"], "min_cases": 0})
    site = Site(ROGUE, rules, hospitals.folder / "rogue-state")
    config = settings(
        "duel",
        rounds=len(HOSTILE_REPLIES),
        min_clients=1,
        deadline=30.0,
        data={"phantom": {"hospitals": 5, "size": 16, "cases": 8}},
        evaluate={"metrics": ["dice"], "overlays": 0, "every": 100},
    )
    compress_zeros()  # takes seconds, which the rounds do not wait
    command = hospitals.submit(config, names=["west", ROGUE])
    largest = {"run": 0.0, "server": 0.0}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            for process, kind in [
                (stage.server(), "server"),
                *((job, "run") for job in hospitals.server_jobs()),
            ]:
                try:
                    largest[kind] = max(largest[kind], process.memory_info().rss / 2**20)
                except psutil.Error:
                    continue

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    sent: dict[int, tuple[str, Said]] = {}
    held: list[str] = []
    tail = LogTail(stage.calls)
    with Caller(stage.rogue) as rogue:
        until(lambda: rogue.hello().code == "OK", 30, "the rogue takes part", 0.5)
        while command.is_running:
            rogue.call("Beat", b"{}")
            found = rogue.wait(2.0, held)
            if found is None:
                continue
            info, content = found
            held.append(str(info["letter"]))
            parcel = find_request(content, hospitals.folder)
            reply = site.answer(parcel)
            number, task = int(parcel.header["round"]), parcel.header["task"]
            if task != "train":
                rogue.answer(info, as_file(reply, hospitals.folder))
                continue
            name, attack = HOSTILE_REPLIES[number]
            said = attack(rogue, info, reply, hospitals.folder, stage.mark)
            sent[number] = (name, said)
            if said.code != "OK":  # the round need not wait for its deadline
                rogue.call("Answer", encode({"job": info["job"], "letter": info["letter"], "failed": "-"}))
    done.set()
    watching.join()
    code = command.wait(60)
    lines = records(hospitals.run_folder("duel"))
    for record in lines:
        name, said = sent.get(record["round"] - 1, ("nothing", Said("", "")))
        told = {**record["refused"], **record["lost"]}.get(f"train/{ROGUE}", "")
        strays = [text for text in record.get("stray", []) if "unreadable" in text]
        why = str(strays[-1] if strays else told) if said.code == "OK" else f"{said.code}: {said.text}"
        holds = bool(said.code and told) and list(record["loss"]) == ["west"]
        checks.check(holds, f"reply: {name}", said=" ".join(why.split())[:130])
    facts = {f"{kind}_mib": round(value) for kind, value in largest.items()}
    checks.check(
        code == 0
        and len(lines) == len(HOSTILE_REPLIES)
        and not stage.mark.exists()
        and largest["run"] < 1000,
        "the run with hostile replies ends, its other hospital in every round",
        refused_in_log=len(tail.lines(ROGUE)),
        **facts,
    )


# Connections


def attack_connections(stage: Stage) -> None:
    server = stage.server()
    server.rlimit(psutil.RLIMIT_NOFILE, (1024, 1024))
    base = server.num_fds()
    with stage.attack("687 idle connections without a certificate, 1,024 descriptors", 0) as facts:
        idle = [socket.create_connection(("127.0.0.1", stage.organiser.port)) for _ in range(687)]
        time.sleep(1)
        most = server.num_fds()
        facts |= measure_recovery(stage, base, most)
        for each in idle:
            each.close()
    for count in (2000,):
        with stage.attack(f"{count:,} connections with a valid certificate", 0) as facts:
            kept, failed, most = [], 0, 0
            for number in range(count):
                try:
                    kept.append(connect_tls(stage.rogue, 1.0))
                except OSError:
                    failed += 1
                if number % 50 == 0:
                    most = max(most, server.num_fds())
            held = max(stage.hospitals.heard()[name] for name in NAMES)
            for each in kept:
                each.close()
            facts |= measure_recovery(stage, base, most)
            facts |= {"turned_away": failed, "heard_meanwhile": round(held, 1)}
            facts["ok"] = facts["ok"] and held < SECONDS


def measure_recovery(stage: Stage, base: int, most: int) -> dict[str, Any]:
    """Seconds until another hospital can connect anew, and until descriptors are what they were."""
    began = time.monotonic()

    def hello() -> bool:
        with Caller(stage.hospitals.kit("north"), "preflight") as other:
            return other.hello().code == "OK"

    until(hello, 30, "another hospital can connect", 0.2)
    connected = since(began)
    until(lambda: stage.server().num_fds() < base + 60, 90, "connections are dropped", 0.2)
    facts = {"descriptors": [base, most], "new_connection_after": connected, "dropped_after": since(began)}
    return {"ok": most < 1000 and connected < 10, **facts}


# From a local process without a certificate


def attack_locally(stage: Stage) -> None:
    hospitals, checks = stage.hospitals, stage.checks
    for name in NAMES:
        found = sockets_of(hospitals.joined[name].tree())
        checks.check(
            not found,
            f"no process of {name} listens",
            processes=len(hospitals.joined[name].tree()),
            sockets=found,
        )
    found = sockets_of(hospitals.server.tree())
    port = stage.organiser.port
    expected = [f"tcp {port}"]
    checks.check(
        found == expected,
        "the server listens on one TCP port and nothing else",
        sockets=found,
    )
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        answer = plain.recv(1000)
    checks.check(answer[:1] in (b"", b"\x15"), "which answers nothing but TLS", answer=answer[:20])
    hospitals.folder.chmod(0o755)
    hospitals.kits.chmod(0o755)
    for name in ("organiser", "north"):
        kit = hospitals.kits / name
        modes = {oct(path.stat().st_mode & 0o777) for path in (kit, *kit.glob("keys"), *kit.glob("keys/*"))}
        checks.check(modes <= {"0o700", "0o600"}, f"keys of {name} are its owner's", modes=sorted(modes))
        tries = [f"cat {kit}/keys/own.key", f"ls {kit}", f"touch {kit}/state/queue/x.json", f"touch {kit}/state/x",
                 f"echo 'tasks: all' >> {kit}/site.yaml", f"cat {kit}/state/egress.jsonl"]  # fmt: skip
        codes = [subprocess.run(["/bin/sh", "-c", line], user=65534, group=65534, extra_groups=[], capture_output=True).returncode for line in tries]  # fmt: skip
        checks.check(
            all(codes), f"another account cannot read or command the kit of {name}", tried=len(codes)
        )


def sockets_of(processes: list[psutil.Process]) -> list[str]:
    """Everything a local process could connect or send to."""
    found = []
    for process in processes:
        try:
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM:
                    found.append(f"{'tcp' if each.type == socket.SOCK_STREAM else 'udp'} {each.laddr.port}")
            found += [f"unix {each.laddr}" for each in process.net_connections("unix") if each.laddr]
        except psutil.NoSuchProcess:
            continue
    return found


# Kits


def attack_with_kits(stage: Stage) -> None:
    code = f"import os\nos.system('touch {stage.mark}')\n"
    for role, name in (("join", "north"), ("server", "organiser")):
        for what, change in KIT_CHANGES.items():
            folder = stage.hospitals.folder / "kit-copies" / f"{name}-{what.replace(' ', '-')}"
            shutil.copytree(
                stage.hospitals.kits / name, folder, ignore=shutil.ignore_patterns("exchange", "runs")
            )
            change(folder, code)
            began = time.monotonic()
            done = stage.hospitals.run(role, folder)
            said = " ".join((done.stdout + done.stderr).split())
            holds = done.returncode == 2 and "Traceback" not in said and not stage.mark.exists()
            stage.checks.check(
                holds,
                f"{role}: a kit with {what}",
                said=said.replace(str(folder), "KIT")[:140],
                seconds=since(began),
            )


def add(name: str) -> Any:
    def change(kit: Path, code: str) -> None:
        (kit / name).parent.mkdir(parents=True, exist_ok=True)
        (kit / name).write_text(code)

    return change


def link(name: str) -> Any:
    def change(kit: Path, code: str) -> None:
        target = kit.parent / f"{kit.name}-target"
        (kit / name).rename(target)
        (kit / name).symlink_to(target)

    return change


KIT_CHANGES: dict[str, Any] = {
    "a module torch.py": add("torch.py"),
    "sitecustomize.py": add("sitecustomize.py"),
    "a folder custom": add("custom/evil.py"),
    "a file among its keys": add("keys/extra.py"),
    "a link for its certificate": link("keys/own.crt"),
    "a link for its keys": link("keys"),
    "a link for kit.json": link("kit.json"),
    "a changed README.txt": add("README.txt"),
}


def list_topics(checks: Checks) -> None:
    checks.note("what each process answers:")
    checks.note(f"  wardround server: {', '.join(f'/{SERVICE}/{name}' for name in METHODS)}")
    checks.note(
        "  a run's process, wardround join, and the processes that train: nothing; they have no socket that listens"
    )


def main() -> None:
    beside = settings("beside", rounds=12, data={"phantom": {"hospitals": 4, "size": 32, "cases": 24}})
    logging.getLogger("wardround").setLevel(logging.ERROR)
    with Checks(__doc__) as checks, Deployment(NAMES, checks.options.keep, [ROGUE]) as hospitals:
        list_topics(checks)
        stage = Stage(checks, hospitals)
        expected = trained(hospitals.folder, beside)
        if checks.wants("kits"):
            with checks.part("kits with added files and links"):
                attack_with_kits(stage)
        hospitals.serve()
        hospitals.join_all()
        with Beside(hospitals, beside) as runs:
            for part, work in PARTS.items():
                if checks.wants(part):
                    with checks.part(f"from {part}"):
                        work(stage)
        runs.check(checks, expected)
        said = hospitals.server.text
        checks.check(
            "Traceback" not in said, "the server's output has no traceback", lines=len(said.splitlines())
        )
        if checks.wants("organiser"):
            hospitals.server.signal(signal.SIGTERM)
            hospitals.server.wait(30)
            with checks.part("from a modified organiser's server"):
                attack_as_organiser(stage)
            hospitals.serve()
            hospitals.wait_connected(NAMES)
            hospitals.wait_done(hospitals.submit({**beside, "name": "after"}), "after", 900)
            found = fingerprint(hospitals.run_folder("after"))
            checks.check(found == expected, f"a run afterwards: {found[:12]}, with train {expected[:12]}")
        for name in NAMES:
            checks.check(hospitals.ledger_holds(name), f"the ledger of {name} verifies")


PARTS = {"local": attack_locally, "hospital": attack_as_hospital, "connections": attack_connections}

if __name__ == "__main__":
    main()
