"""Reads a program's settings into its frozen dataclass.

Precedence: command line > environment (``PREFIX_*``) > TOML file > default. Invariant: an unknown key
or a bad value is one error that names the key and its source, and never repeats the value as it
may be a secret. The dataclass says everything: names, types, defaults, and a string under each
field that becomes the flag's help. Must not know: which settings a program has.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SettingsT = TypeVar("SettingsT", bound="DataclassInstance")

MakeError = Callable[[str], Exception]
"""Makes the program's own error from one sentence."""


@dataclass(frozen=True, slots=True)
class SettingsReader(Generic[SettingsT]):
    """Reads the settings of one program."""

    kind: type[SettingsT]
    """Frozen dataclass: every field of type str, int, float, Path, tuple[str, ...], or one of them or
    None; a default each; a string under each."""
    env_prefix: str
    """Prefix of its environment variables, with the last underscore."""
    program: str
    """Name in the usage line."""
    description: str
    """One sentence for ``--help``."""
    error: MakeError
    """Makes the error for a bad setting."""

    def load(self, argv: Sequence[str], environ: Mapping[str, str]) -> SettingsT:
        """Merge command line, environment, TOML file and defaults.

        Args:
            argv: command line without the program's name.
            environ: the process environment; only variables with the prefix are looked at.

        Returns:
            The validated settings.

        Raises:
            the reader's error: an unknown key or a bad value, named with its source.
        """
        arguments = vars(self._parser().parse_args(argv))
        from_env = {
            key.removeprefix(self.env_prefix).lower(): value
            for key, value in environ.items()
            if key.startswith(self.env_prefix)
        }
        config_file = arguments.pop("config") or from_env.pop("config", None)
        from_toml = self._read_toml(Path(config_file)) if config_file else {}
        from_cli = {key: value for key, value in arguments.items() if value is not None}
        kinds = typing.get_type_hints(self.kind)
        values: dict[str, Any] = {}
        # Later sources override earlier ones.
        for source, settings in (
            (f"file {config_file}", from_toml),
            ("environment", from_env),
            ("command line", from_cli),
        ):
            for key, raw in settings.items():
                if key not in kinds:
                    shown = self.env_prefix + key.upper() if source == "environment" else key
                    raise self.error(f"unknown setting {shown!r} ({source})")
                try:
                    values[key] = _convert(raw, kinds[key])
                except (ValueError, TypeError) as error:
                    # The value itself is not repeated: it may be a secret.
                    raise self.error(f"setting {key!r} ({source}): {error}") from error
        return self.kind(**values)

    def _parser(self) -> argparse.ArgumentParser:
        parser = _Parser(
            self.error,
            prog=self.program,
            description=self.description,
            epilog=f"Each setting is also an environment variable, {self.env_prefix}NAME, and a TOML"
            " key.",
            allow_abbrev=False,
        )
        parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
        docs = field_docs(self.kind)
        for item in fields(self.kind):
            default = "none" if item.default is None else item.default
            help_text = f"{docs[item.name]} [default: {default}]".replace("%", "%%")
            parser.add_argument(
                "--" + item.name.replace("_", "-"), metavar="VALUE", default=None, help=help_text
            )
        return parser

    def _read_toml(self, path: Path) -> dict[str, Any]:
        try:
            return tomllib.loads(path.expanduser().read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise self.error(f"cannot read the settings file {path}: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise self.error(f"{path} is not valid TOML: {error}") from error


def field_docs(kind: type) -> dict[str, str]:
    """Return the string under each field of a dataclass, by name."""
    tree = ast.parse(inspect.getsource(kind))
    assert isinstance(tree.body[0], ast.ClassDef)
    docs: dict[str, str] = {}
    name = ""
    for node in tree.body[0].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            docs[name] = str(node.value.value)
            name = ""
    return docs


def read_secret(path: Path, key: str, *, error: MakeError) -> str:
    """Read the first line of a secret's file; the error names the key, never the content."""
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"{key}: cannot read {path}: {cause}") from cause
    if not lines or not lines[0].strip():
        raise error(f"{key}: {path} is empty")
    return lines[0].strip()


def check_settings(
    settings: object,
    *,
    ranges: Sequence[tuple[str, float, float]],
    choices: Mapping[str, Sequence[str]],
    error: MakeError,
) -> None:
    """Hold numbers to their ranges and names to their choices.

    Args:
        settings: the dataclass's instance.
        ranges: (field, least, greatest), both allowed; not a number never is.
        choices: allowed values by field.
        error: makes the error, which names the field.
    """
    for name, low, high in ranges:
        value = getattr(settings, name)
        if not low <= value <= high or not math.isfinite(value):
            raise error(f"{name} is {value}, must be from {low:g} to {high:g}")
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            raise error(
                f"{name} is {getattr(settings, name)!r}, must be one of {', '.join(allowed)}"
            )


def check_subject_token(value: str, key: str, *, most: int = 64, error: MakeError) -> None:
    """Hold a name to what can stand as one token of a NATS subject.

    A dot or a wildcard would leave the tenant's fence.
    """
    if not re.fullmatch(rf"[A-Za-z0-9_-]{{1,{most}}}", value):
        raise error(f"{key} is {value!r}, must be 1 to {most} letters, digits, '-' or '_'")


def check_broker_url(value: str, key: str, *, error: MakeError) -> None:
    """Hold a URL to the schemes of a NATS broker."""
    if not re.match(r"(nats|tls|ws|wss)://", value):
        raise error(f"{key} is {value!r}, must start with nats:// or tls://")


class _Parser(argparse.ArgumentParser):
    def __init__(self, make_error: MakeError, **options: Any) -> None:
        super().__init__(**options)
        self._make_error = make_error

    def error(self, message: str) -> typing.NoReturn:
        raise self._make_error(message)


def _convert(raw: object, kind: Any) -> object:
    """Convert a raw setting to a field's type; text comes from the shell, other types from TOML."""
    if isinstance(kind, types.UnionType):
        kind = next(arm for arm in typing.get_args(kind) if arm is not type(None))
    if kind is Path:
        if not isinstance(raw, str) or not raw:
            raise ValueError("must be a path")
        return Path(raw).expanduser()
    if kind is str:
        if not isinstance(raw, str):
            raise ValueError("must be text")
        return raw
    if kind is int:
        return _to_int(raw)
    if kind is float:
        return _to_float(raw)
    # What is left are tuples of text: a TOML list, or text separated by commas.
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError("must be a list of texts")
    return tuple(part.strip() for part in parts if part.strip())


def _to_int(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise ValueError("must be a whole number")
    try:
        return int(raw)
    except ValueError:
        raise ValueError("must be a whole number") from None


def _to_float(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError("must be a number")
    try:
        return float(raw)
    except ValueError:
        raise ValueError("must be a number") from None
