"""The model: weights, identity, tokenizer, KV geometry, prefill and generation."""

from __future__ import annotations

from engine import _openmp as _openmp  # first: it must run before torch is loaded
from engine.catalog import CATALOG, CatalogModel, cache_root, resolve_model
from engine.errors import (
    CacheRangeError,
    ContextTooLong,
    DeviceUnavailable,
    EngineError,
    TokenizerError,
    UnknownModel,
    UnsupportedModel,
    WeightsError,
)
from engine.geometry import KvGeometry
from engine.identity import ModelIdentity
from engine.kv_cache import KvCache
from engine.loading import load_engine
from engine.protocol import Engine
from engine.rope import RotaryTables
from engine.sampling import Sampling
from engine.tokenizer import Tokenizer
from engine.torch_engine import TorchEngine

__all__ = [
    "CATALOG",
    "CacheRangeError",
    "CatalogModel",
    "ContextTooLong",
    "DeviceUnavailable",
    "Engine",
    "EngineError",
    "KvCache",
    "KvGeometry",
    "ModelIdentity",
    "RotaryTables",
    "Sampling",
    "Tokenizer",
    "TokenizerError",
    "TorchEngine",
    "UnknownModel",
    "UnsupportedModel",
    "WeightsError",
    "cache_root",
    "load_engine",
    "resolve_model",
]
