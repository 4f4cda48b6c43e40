"""systemd units, so that `join` and `server` start at boot and come back after a crash."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

from wardround.deploy.kits.kit import Kit
from wardround.deploy.kits.private_key import PASSPHRASE_FILE, is_encrypted
from wardround.files import write_text

FIRST_FREE_PORT = 1024  # below it, a program needs a right to listen


def write_unit(kit: Kit) -> Path:
    """The unit of a kit, beside it; it runs as the account that writes it."""
    path = kit.folder.with_name(f"{name_unit(kit)}.service")
    write_text(path, render_unit(kit, getpass.getuser(), find_program()))
    return path


def name_unit(kit: Kit) -> str:
    return f"wardround-{kit.name}"


def render_unit(kit: Kit, user: str, program: list[str]) -> str:
    is_server = kit.role == "organiser"
    command = [*program, "server" if is_server else "join", str(kit.folder)]
    more = []
    if is_server and kit.port < FIRST_FREE_PORT:
        more.append("AmbientCapabilities=CAP_NET_BIND_SERVICE")
    key = kit.own_key if kit.own_key.exists() else kit.next_key
    if key.exists() and is_encrypted(
        key
    ):  # systemd reads the file as root and shows it to this service alone
        more.append(f"LoadCredential=passphrase:/etc/wardround/{kit.name}.passphrase")
        more.append(f"Environment={PASSPHRASE_FILE}=%d/passphrase")
    return f"""\
# sudo cp {name_unit(kit)}.service /etc/systemd/system/ && sudo systemctl enable --now {name_unit(kit)}
# See what it says: journalctl -u {name_unit(kit)}
[Unit]
Description=wardround, {kit.role if is_server else f"hospital {kit.name}"} of {kit.project}
Wants=network-online.target
After=network-online.target

[Service]
User={user}
ExecStart={" ".join(quote(word) for word in command)}
Restart=on-failure
RestartSec=30
# 2: something must be corrected first; 130: the orderly end
RestartPreventExitStatus=2
SuccessExitStatus=130
KillMode=mixed
TimeoutStopSec=30
NoNewPrivileges=yes
ProtectSystem=full
{"".join(f"{line}{chr(10)}" for line in more)}
[Install]
WantedBy=multi-user.target
"""


def find_program() -> list[str]:
    """How wardround is started here, whatever the path of the shell."""
    script = Path(sys.executable).with_name("wardround")
    return [str(script)] if script.exists() else [sys.executable, "-m", "wardround"]


def quote(word: str) -> str:
    """A word of a command line as systemd reads it.

    >>> quote("/srv/a b/100%")
    '"/srv/a b/100%%"'
    """
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if escaped == word and " " not in word else f'"{escaped}"'
