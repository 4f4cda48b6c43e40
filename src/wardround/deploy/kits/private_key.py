"""Private keys: made, kept with or without a passphrase, and read.

A passphrase comes from WARDROUND_PASSPHRASE, from the file that WARDROUND_PASSPHRASE_FILE names, or from the
terminal; never from a command line, and it is in no log.
"""

from __future__ import annotations

import getpass
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.utils import CryptographyDeprecationWarning

from wardround.errors import ConfigError

PASSPHRASE, PASSPHRASE_FILE = "WARDROUND_PASSPHRASE", "WARDROUND_PASSPHRASE_FILE"
LONGEST = 1000  # characters of a passphrase; OpenSSL takes 1,023
SHORTEST = 8


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Whatever is wrong with a certificate, request or list is a ValueError, what is out of date too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", CryptographyDeprecationWarning)
            yield
    except (x509.InvalidVersion, UnsupportedAlgorithm, CryptographyDeprecationWarning) as error:
        raise ValueError(str(error)) from None


def make_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


def encode_key(key: rsa.RSAPrivateKey, passphrase: bytes | None = None) -> bytes:
    """PEM; with a passphrase encrypted in the library's own way."""
    if passphrase is None:
        form, encryption = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        return key.private_bytes(serialization.Encoding.PEM, form, encryption)
    encrypted = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encrypted)


def load_key(path: Path) -> rsa.RSAPrivateKey:
    """The key in a file; ValueError where it cannot be read, ConfigError where its passphrase is wrong."""
    content, passphrase = path.read_bytes(), find_passphrase(path)
    try:
        key = serialization.load_pem_private_key(content, passphrase)
    except ValueError:
        if passphrase is None:
            raise
        raise ConfigError(f"the passphrase of {path} is wrong, or the file is damaged.") from None
    if not isinstance(key, rsa.RSAPrivateKey):
        raise ValueError("a key of another kind")
    return key


def read_pem(path: Path) -> bytes:
    """The key without its passphrase, for TLS; it stays in memory."""
    return path.read_bytes() if find_passphrase(path) is None else encode_key(load_key(path))


def find_passphrase(path: Path) -> bytes | None:
    """The passphrase of a key, None where it has none."""
    return ask_passphrase(path) if is_encrypted(path) else None


def is_encrypted(path: Path) -> bool:
    return b"ENCRYPTED" in path.read_bytes()[:LONGEST]


@cache
def ask_passphrase(path: Path) -> bytes:
    """Asked once in a process."""
    given = read_environment()
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{path} has a passphrase. Start this on a terminal, which asks for it, or name a file that "
            f"holds it: {PASSPHRASE_FILE}=FILE"
        )
    return getpass.getpass(f"Passphrase of {path}: ").encode()[:LONGEST]


def ask_new_passphrase(path: Path) -> bytes:
    """The passphrase for a key that is about to be made."""
    given = read_environment()
    if given is None and not sys.stdin.isatty():
        raise ConfigError(
            f"there is no terminal to ask for a passphrase. Name a file: {PASSPHRASE_FILE}=FILE"
        )
    if given is None:
        given = getpass.getpass(f"New passphrase for {path}: ").encode()
        if getpass.getpass("Once more: ").encode() != given:
            raise ConfigError("the two passphrases differ. Nothing was changed; start again.")
    if not SHORTEST <= len(given) <= LONGEST:
        raise ConfigError(f"a passphrase has {SHORTEST} to {LONGEST} characters; this one has {len(given)}.")
    return given


@cache
def read_environment() -> bytes | None:
    """The passphrase that was handed over, taken out of what child processes get."""
    text, file = os.environ.pop(PASSPHRASE, ""), os.environ.pop(PASSPHRASE_FILE, "")
    if text or not file:
        return text.encode() or None
    try:
        with Path(file).open("rb") as opened:
            found = opened.read(LONGEST + 1).rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"{PASSPHRASE_FILE} is {file}: {error.strerror}.") from None
    if not found:
        raise ConfigError(f"{PASSPHRASE_FILE} is {file}, which is empty.")
    return found
