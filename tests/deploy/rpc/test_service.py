"""What each process answers: a new door makes one of these lists longer, and a test here fail."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch, importorskip

importorskip("grpc")

import wardround.deploy
from wardround.deploy.kits.kit import read_kit
from wardround.deploy.rpc import server as servers
from wardround.deploy.rpc.server import HospitalServer

DEPLOY = Path(wardround.deploy.__file__).parent
OPENERS = {
    "server",
    "add_secure_port",
    "add_insecure_port",
    "create_server",
    "start_server",
    "bind",
    "start_unix_server",
    "HTTPServer",
    "ThreadingHTTPServer",
}
# Fields of the lines between a process and the one it started, by the module that reads them.
READ = {
    "server.py": {
        "post",
        "close",
        "path",
        "limit",
        "head",
        "sha256",
        "seconds",
        "hospital",
        "letter",
    },  # from a run's process
    "run_process.py": {
        "job",
        "arguments",
        "exchange",
        "letter",
        "path",
        "hospital",
        "alive",
        "moving",
        "strays",
        "stop",
    },
    "joining.py": {
        "wrong",
        "reply",
        "failed",
        "ready",
        "largest",
        "seconds",
        "sign",
    },  # from the process that trains
    "worker.py": {"check", "request", "reply", "model", "largest", "signature", "failed"},
}


def calls(path: Path) -> Iterator[str]:
    """Names of what a module calls as an attribute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr


def fields(path: Path) -> Iterator[str]:
    """Keys that a module looks for in a line from another process."""
    lines = {"line", "first", "found"}
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))) if name in lines:
                yield key
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="get"),
                args=[ast.Constant(value=str(key)), *_],
            ):
                if name in lines:
                    yield key
            case ast.Compare(left=ast.Constant(value=str(key)), comparators=[ast.Name(id=name)]) if (
                name in lines
            ):
                yield key


def test_only_the_organisers_port_listens() -> None:
    own = [path for path in DEPLOY.rglob("*.py") if "nvflare" not in path.parts]
    found = {path.relative_to(DEPLOY).as_posix(): set(calls(path)) & OPENERS for path in own}
    assert {name: opened for name, opened in found.items() if opened} == {
        "rpc/server.py": {"server", "add_secure_port"},
        "status_page.py": {"ThreadingHTTPServer"},  # `status --page`, on 127.0.0.1
        "processes.py": {"bind"},  # free_ports: asks for a free number, and lets it go
        "preflight/connection.py": {"bind"},  # is the port taken?
    }


def test_the_server_has_one_handler_with_four_methods_on_one_port(
    kits: Path, monkeypatch: MonkeyPatch
) -> None:
    seen: list[tuple[str, Any]] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: seen.append((name, arguments))

    monkeypatch.setattr(servers.grpc, "server", lambda *_, **__: Recorder())
    hospitals = HospitalServer(read_kit(kits / "organiser"), kits)
    hospitals.start()
    assert [name for name, _ in seen] == ["add_generic_rpc_handlers", "add_secure_port", "start"]
    assert seen[0][1] == ((hospitals,),)
    text = Path(servers.__file__).read_text()
    assert (
        set(servers.METHODS) == {"Hello", "Beat", "Wait", "Answer"}
        and "assert tuple(handlers) == METHODS" in text
    )


def test_lines_between_our_processes_have_a_closed_list_of_fields() -> None:
    assert {name: set(fields(DEPLOY / name)) for name in READ} == READ
