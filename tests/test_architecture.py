"""Imports point one way, modules stay small, a class name has one home, and tests mirror the tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "wardround"

# A line may import from the lines above it, never from those below. Names on one line know nothing of each other.
LAYERS = """
version errors text seeds objects machine
files settings yaml_file tables seeding plugins progress python_words
storage child_process builtin_configs precision
params
host_copy gpu_service
messages
aggregation metrics models privacy
data
config
losses
uncertainty training
clients
methods
config_file
engine
api papers planning
batch batch_process
cluster
configuring
comparison
reporting
prediction
exporting
deploy demo
cli
__main__
"""
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_METHODS = 450, 60, 20
# What Linux, macOS or Windows lacks or does otherwise: only machine.py may use it.
ONE_SYSTEM = """
fcntl msvcrt winreg resource termios tty pty pwd grp ctypes mmap _thread
os.name sys.platform platform.system sys.getwindowsversion os.uname
os.sched_getaffinity os.sched_setaffinity os.sysconf os.getloadavg os.nice os.statvfs
os.fork os.setsid os.getpgid os.killpg os.kill os.getuid os.geteuid os.umask os.chown
os.link os.symlink os.mkfifo os.open os.pread os.preadv os.pwrite os.posix_fadvise stat.S_IMODE
signal.SIGKILL signal.SIGHUP signal.SIGALRM signal.SIGUSR1 signal.SIGUSR2 signal.SIGQUIT
signal.alarm signal.setitimer signal.pause
start_new_session= preexec_fn= pass_fds=
"""
PROMISES = {  # tests of the whole product, or of what all members of a room keep
    "test_architecture", "test_decoders", "test_docs", "test_tutorial", "test_public_api", "browser/test_report_in_browser",
    "test_code_blocks", "test_typed_in", "test_containers", "test_extras", "test_release", "test_supply_chain",
    "browser/test_site_in_browser", "methods/test_all_methods", "models/test_all_networks", "cli/test_imports",
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name without the package's own."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Our own modules that a file imports, also under TYPE_CHECKING; and whether inside a function."""

    def walk(node: ast.AST, is_late: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "wardround":
                for name in child.names:
                    yield f"{child.module}.{name.name}".removeprefix("wardround."), is_late
            elif isinstance(child, ast.Import):
                yield from ((n.name[10:], is_late) for n in child.names if n.name.startswith("wardround."))
            yield from walk(child, is_late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    for name, is_late in walk(ast.parse(path.read_text(encoding="utf-8")), False):
        while name and name not in modules():
            name = name.rpartition(".")[0]
        if name:
            yield name, is_late


def test_imports_point_down_the_layers() -> None:
    level = {name: number for number, line in enumerate(LAYERS.split("\n")) for name in line.split()}
    wrong = []
    for module, path in modules().items():
        here = module.split(".")[0]
        for target, _ in imports(path):
            there = target.split(".")[0]
            if module and here != there and level[there] >= level[here]:
                wrong.append(f"{module} imports {target}")

    assert not wrong
    assert level.keys() == {name.split(".")[0] for name in modules() if name}


def test_no_module_imports_itself_through_others() -> None:
    graph = {m: {t for t, _ in imports(path) if t != m} for m, path in modules().items() if m}
    done: set[str] = set()

    def follow(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for target in sorted(graph[module]):
                follow(target, (*way, module))
            done.add(module)

    for module in graph:
        follow(module, ())


def test_only_the_command_line_imports_late() -> None:
    late = [
        f"{module} imports {target}"
        for module, path in modules().items()
        for target, is_late in imports(path)
        if is_late and module.split(".")[0] != "cli"
    ]

    assert not late


def test_modules_functions_and_classes_stay_small() -> None:
    large = []
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MOST_LINES:
            large.append(f"{module}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.FunctionDef)
                and node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION
            ):
                large.append(f"{module}.{node.name}: {node.end_lineno - node.lineno + 1} lines")
            if isinstance(node, ast.ClassDef):
                count = sum(isinstance(child, ast.FunctionDef) for child in node.body)
                if count > MOST_METHODS:
                    large.append(f"{module}.{node.name}: {count} methods")

    assert not large


def test_a_class_name_has_one_home() -> None:
    homes = defaultdict(list)
    for module, path in modules().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)

    assert not {name: where for name, where in homes.items() if len(where) > 1}


def uses(path: Path) -> Iterator[str]:
    """Modules that a file imports, and names like `os.kill` that it reads."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{name.name}" for name in node.names))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.keyword):
            yield f"{node.arg}="
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("/proc", "/sys/", "/dev/")):
            yield str(node.value)


def test_only_one_module_knows_what_systems_do_not_share() -> None:
    special = {
        f"{module}: {name}"
        for module, path in modules().items()
        for name in uses(path)
        if name in ONE_SYSTEM.split() or name.startswith("/")
    }

    assert {entry for entry in special if not entry.startswith("machine: ")} == {
        "cli: os.open",  # os.devnull, which every system has
    }
    assert "machine: os.killpg" in special and "machine: /sys/fs/cgroup/memory.max" in special


def test_every_room_says_what_it_is_for() -> None:
    rooms = [path for path in modules().values() if path.name == "__init__.py"]

    assert not [str(p) for p in rooms if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]


def test_a_test_file_stands_where_its_module_or_room_does() -> None:
    names = {name.replace(".", "/") for name in modules() if name}
    homeless = []
    for path in sorted(TESTS.rglob("test_*.py")):
        place = path.relative_to(TESTS).with_suffix("")
        module = str(place.parent / place.name.removeprefix("test_"))
        is_room = place.parent.name == place.name.removeprefix("test_") and str(place.parent) in names
        if module not in names and not is_room and str(place) not in PROMISES:
            homeless.append(str(place))

    assert not homeless


def test_every_module_has_tests_of_its_own_or_of_its_room() -> None:
    tests = {str(p.relative_to(TESTS).with_suffix("")).replace("test_", "") for p in TESTS.rglob("test_*.py")}
    untested = []
    for module, path in modules().items():
        place, room = module.replace(".", "/"), module.replace(".", "/").rpartition("/")[0]
        name = room.rpartition("/")[2]
        homes = {place, room, f"{room}/{name}", f"{room}/all_{name}"}
        if room and path.name != "__init__.py" and not homes & tests:
            untested.append(module)

    assert not untested
