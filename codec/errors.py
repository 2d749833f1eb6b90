"""Typed errors of the codec room: one root, one class per way a caller or a file can be wrong."""

from __future__ import annotations

__all__ = [
    "CodecError",
    "CorruptBitstream",
    "NonFiniteInput",
    "ProfileMismatch",
    "ShapeMismatch",
    "UnknownLevel",
    "UnsupportedVersion",
]


class CodecError(ValueError):
    """Root of everything that this room raises on bad input."""


class CorruptBitstream(CodecError):
    """The bytes are no bitstream or profile of ours, or were cut or changed on the way."""


class UnsupportedVersion(CodecError):
    """The format is ours, but its version is not one that this build reads."""

    def __init__(self, what: str, *, expected: int, actual: int) -> None:
        super().__init__(f"{what} has format version {actual}; this build reads version {expected}")
        self.expected = expected
        self.actual = actual


class ShapeMismatch(CodecError):
    """An array's axes, dtype or token range do not fit the geometry."""


class NonFiniteInput(CodecError):
    """A value is NaN, infinite, or too large for the level; `index` is the first such place."""

    def __init__(self, reason: str, *, index: tuple[int, ...], value: float) -> None:
        layer, kv, token, head, dim = index
        super().__init__(
            f"{reason}: {value} in the {'value' if kv else 'key'} of layer {layer}, "
            f"token {token} of the chunk, head {head}, dim {dim}"
        )
        self.index = index
        self.value = value


class ProfileMismatch(CodecError):
    """The bitstream was made for another model or with another profile than the codec holds."""

    def __init__(self, what: str, *, expected: bytes, actual: bytes) -> None:
        super().__init__(f"{what} differs: expected {expected.hex()}, found {actual.hex()}")
        self.expected = expected
        self.actual = actual


class UnknownLevel(CodecError):
    """No level of that name exists, or the profile that it needs is not loaded."""
