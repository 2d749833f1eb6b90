"""Building dataclasses from parsed TOML or JSON, strictly.

Invariant: an unknown key, a missing one or a value of the wrong type ends in the caller's error, with the
path of the key. Must not know: what is read, or from where.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

ValueT = TypeVar("ValueT")

Refuse = Callable[[str, str], NoReturn]
"""Raises the caller's error for a key and a problem."""
Shorthand = Mapping[type, Callable[[str], object]]
"""For a dataclass that may be written as a text: how to build it from one."""

_NONE: Shorthand = types.MappingProxyType({})
_TYPE_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@functools.cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return type and optionality of each field that may be given."""
    hints = typing.get_type_hints(kind)
    return {
        item.name: (
            hints[item.name],
            item.default is not dataclasses.MISSING
            or item.default_factory is not dataclasses.MISSING,
        )
        for item in dataclasses.fields(kind)
        if item.init and item.metadata.get("given", True)
    }


def build(
    kind: type[ValueT], raw: object, refuse: Refuse, *, key: str = "", shorthand: Shorthand = _NONE
) -> ValueT:
    """Build a dataclass from a mapping.

    Args:
        kind: a dataclass; a field with ``metadata={"given": False}`` may not be in the mapping.
        raw: what the parser made.
        refuse: raises.
        key: path of the mapping, for messages.
        shorthand: dataclasses that may be written as one text.
    """
    prefix = f"{key}." if key else ""
    if not isinstance(raw, Mapping):
        refuse(key, "must be a table")
    known = _fields(typing.cast("Any", kind))
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in known:
            refuse(f"{prefix}{name}", f"unknown key; known are {', '.join(known)}")
        values[name] = _value(known[name][0], value, refuse, f"{prefix}{name}", shorthand)
    for name, (_, is_optional) in known.items():
        if name not in values and not is_optional:
            refuse(f"{prefix}{name}", "is missing")
    return kind(**values)


def _value(hint: Any, value: object, refuse: Refuse, key: str, shorthand: Shorthand) -> object:
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    origin = typing.get_origin(hint)
    if origin is tuple:
        return _tuple(hint, value, refuse, key, shorthand)
    if origin is dict:
        inner = typing.get_args(hint)[1]
        if not isinstance(value, Mapping):
            refuse(key, "must be a table")
        return {
            str(name): _value(inner, item, refuse, f"{key}.{name}", shorthand)
            for name, item in value.items()
        }
    if hint in (Any, object):
        return value
    if dataclasses.is_dataclass(hint):
        kind = typing.cast("type[Any]", hint)
        if isinstance(value, str) and kind in shorthand:
            return shorthand[kind](value)
        return build(kind, value, refuse, key=key, shorthand=shorthand)
    if issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            refuse(key, f"must be one of {', '.join(str(member.value) for member in hint)}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or isinstance(value, bool) != (hint is bool):
        refuse(key, f"must be {_TYPE_NAMES.get(hint, hint)}, not {value!r}")
    return value


def _tuple(
    hint: Any, value: object, refuse: Refuse, key: str, shorthand: Shorthand
) -> tuple[object, ...]:
    inner = typing.get_args(hint)
    if not isinstance(value, list):
        refuse(key, "must be a list")
    kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
    if len(kinds) != len(value):
        refuse(key, f"must have {len(kinds)} entries, not {len(value)}")
    return tuple(
        _value(kind, item, refuse, f"{key}[{index}]", shorthand)
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )
