"""Plugins: methods, objectives, networks, metrics and readers that live outside this package.

A name in a configuration is one of three things: a name of ours, an entry point of an installed package
(group `wardround.methods`, `wardround.objectives`, ...), or an import path `package.module:Name`, found in
the current directory or among the installed packages. Code is imported by `Registry.find` alone, so that a
file from somebody else can be listed, compared and reported without running what it names. What is handed
over in Python has a name as well (`objects`); another process finds a class again by its import path, where
its source is still the same, and never a function.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from wardround.errors import ConfigError
from wardround.objects import digest, name_object, split_name
from wardround.text import suggest

T = TypeVar("T")

imported_modules: set[str] = set()  # of others, in this process


class NotInstalled(ConfigError):
    """What a name means is not on this machine, or not where the command was started."""


class Registry(Mapping[str, T], Generic[T]):
    """Names of one kind: ours, those of installed packages, and import paths.

    kind: "method", "objective", ...; own: ours by name; accept: what a loaded object becomes, None if it is
    not of this kind; expected: what it should have been, for the sentence about one that is not; has_command:
    `wardround methods` and the like list them.

    As a mapping it holds what is ours and what `find` has loaded in this process.
    """

    def __init__(
        self,
        kind: str,
        own: Mapping[str, T],
        accept: Callable[[str, Any], T | None],
        expected: str,
        has_command: bool = True,
    ) -> None:
        self.kind = kind
        self.own = dict(own)
        self._accept = accept
        self._expected = expected
        self._has_command = has_command
        self._loaded: dict[str, T] = {}
        self._given: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        return self.own[name] if name in self.own else self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.own, **self._loaded})

    def __len__(self) -> int:
        return len(self.own | self._loaded)

    @property
    def installed(self) -> dict[str, EntryPoint]:
        """Entry points of installed packages, by name; a name of ours is not replaced by one of theirs."""
        found = entry_points(group=f"wardround.{self.kind}s")
        return {point.name: point for point in found if point.name not in self.own}

    def find(self, name: str, key: str | None = None) -> T:
        """What a name means, imported if need be; key: the setting that holds it."""
        key = key or f"{self.kind}.name"
        if name in self.own or name in self._given:
            return self.own[name] if name in self.own else self._given[name]
        point = self.installed.get(name)
        path = name if point is None else point.value
        if not is_import_path(path):
            known = [*self.own, *self.installed]
            where = (
                f"List all: wardround {self.kind}s."
                if self._has_command
                else f"There are: {', '.join(known)}."
            )
            hint = suggest(name, known)
            raise ConfigError(f"{key} is {name!r}.{hint} {where} Write your own as package.module:Name.")
        found = self._accept(name, import_again(name, key) if "@" in name else import_object(path, key))
        if found is None:
            raise ConfigError(f"{key} is '{name}', which is not {self._expected}.")
        self._loaded[name] = found
        return found

    def give(self, found: T, name: str | None = None) -> str:
        """Take what was handed over in Python; the name by which `find` knows it in this process."""
        own = next((key for key, value in self.own.items() if value is found), None)
        if own is not None:
            return own
        name = name or name_object(found)
        self._given[name] = found
        return name


def accept_subclass(base: type[T]) -> Callable[[str, Any], type[T] | None]:
    """Takes a class that extends `base`, nothing else: only classes are called, never functions."""

    def accept(name: str, found: Any) -> type[T] | None:
        return found if isinstance(found, type) and issubclass(found, base) else None

    return accept


def is_import_path(name: str) -> bool:
    """Whether a name says where to import it from.

    >>> is_import_path("mypackage.nets:MyNet"), is_import_path("unet2d"), is_import_path("monai:UNet")
    (True, False, True)
    """
    module, colon, attribute = split_name(name)[0].partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def import_object(path: str, key: str) -> Any:
    """What an import path names; refused with the reason if there is nothing there."""
    module, _, attribute = path.partition(":")
    found: Any = import_module(module, f"{key} is '{path}'")
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name, value in vars(found).items() if isinstance(value, type)]
            raise ConfigError(f"{key} is '{path}', but {module} has no '{part}'.{suggest(part, names)}")
        found = getattr(found, part)
    return found


def import_again(name: str, key: str) -> type:
    """A class that was handed over in Python once, if it can be imported and its source is the same."""
    path, digits = split_name(name)
    keyword = key.partition(".")[0]
    again = (
        f"Hand it over again: wr.Result.load(folder, {keyword}=...), or wr.run(..., {keyword}=..., "
        "resume=True). Other processes, such as the command line, need a class in a file of its own."
    )
    try:
        found = None if path.startswith("__main__:") else import_object(path, key)
    except ConfigError:
        found = None
    if not isinstance(found, type):
        raise NotInstalled(f"{key} is '{name}', which was handed over in Python and is not here. {again}")
    if digest(found) != digits:
        raise NotInstalled(
            f"{key} is '{name}', handed over in Python, but the source of {path} is another now "
            f"(@{digest(found)}). Restore it, or train again."
        )
    return found


def import_module(module: str, said: str) -> Any:
    """A module of the user's; said: the setting and its value, which begin a message."""
    try:
        with current_directory_first():
            imported_modules.add(module)
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(f"{missing}."):
            raise NotInstalled(
                f"{said}, but there is no module '{missing}' in {Path.cwd()} or among the installed "
                "packages. Start wardround in its folder, or install it."
            ) from None
        raise ConfigError(
            f"{said}, whose module {module} needs '{missing}', which is not installed."
        ) from None
    except (Exception, SystemExit) as error:  # whatever the user's file does wrong; a script may also exit
        raise ConfigError(
            f"{said}, but {module} cannot be imported: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def current_directory_first() -> Iterator[None]:
    """Let an import find files of the current directory, as `python` does and an installed command does not.

    Afterwards the directory stays last, for what the user's code imports later.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)
