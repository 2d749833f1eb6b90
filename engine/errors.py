"""Typed errors of the engine room: one root, every message one sentence that names the thing."""

from __future__ import annotations


class EngineError(Exception):
    """Root of every error that the engine raises on purpose."""


class UnknownModel(EngineError):
    """The name is no catalog model, no folder, and no reachable Hugging Face id."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"model '{name}' cannot be found: {reason}")
        self.name = name


class UnsupportedModel(EngineError):
    """The model's architecture has KV state that this product cannot move."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"model '{name}' is not supported: {reason}")
        self.name = name
        self.reason = reason


class WeightsError(EngineError):
    """Weights could not be fetched, or are not the bytes that the catalog pins."""


class TokenizerError(EngineError):
    """The tokenizer is missing or cannot render what was asked."""


class ContextTooLong(EngineError):
    """More tokens than the model's context window or the cache can hold."""

    def __init__(self, *, num_tokens: int, limit_tokens: int, what: str = "context window") -> None:
        super().__init__(f"{num_tokens} tokens do not fit the {what} of {limit_tokens} tokens")
        self.num_tokens = num_tokens
        self.limit_tokens = limit_tokens


class CacheRangeError(EngineError, ValueError):
    """A KV array or token range does not match the cache it is written to or read from."""


class DeviceUnavailable(EngineError):
    """The requested device is not present on this machine."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"device '{device}' is not available: {reason}")
        self.device = device
