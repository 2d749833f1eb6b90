"""The edge's model: engine and codec, built together so that they cannot disagree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from codec import Codec, CodecError, Geometry, LevelSet, Profile, Rotary, bundled_profiles
from edge_agent.config import EdgeConfig
from edge_agent.errors import ConfigError
from engine import EngineError, TorchEngine, load_engine


@dataclass(frozen=True, slots=True)
class EdgeModel:
    """A loaded engine with the codec for its KV cache."""

    engine: TorchEngine
    codec: Codec


def load_model(config: EdgeConfig) -> EdgeModel:
    """Load engine, profiles and codec; takes seconds, or minutes when weights are fetched first.

    Raises:
        ConfigError: the model or a profile cannot be used; the sentence says why.
    """
    try:
        engine = load_engine(
            config.model,
            device=config.device,
            dtype=config.dtype,
            num_threads=config.num_threads or None,
            cache_dir=config.cache_dir,
        )
    except EngineError as error:
        raise ConfigError(f"model: {error}") from error
    return EdgeModel(engine, build_codec(engine, config.profiles, config.codec_threads))


def build_codec(engine: TorchEngine, profile_paths: tuple[str, ...], num_threads: int) -> Codec:
    """Build the codec for an engine's KV cache.

    Args:
        engine: the loaded model.
        profile_paths: profile files; empty takes the bundled ones.
        num_threads: threads per encode.

    Raises:
        ConfigError: a profile cannot be read or belongs to another model.
    """
    # Profiles hold for a model in every compute dtype; chunk keys and sessions use the full identity.
    model_digest = engine.identity.model_digest
    geometry = engine.geometry
    try:
        profiles = (
            [Profile.load(Path(path).expanduser()) for path in profile_paths]
            if profile_paths
            else bundled_profiles(model_digest)
        )
        rotary: Rotary | None = None
        if any(profile.level_set is LevelSet.KLT for profile in profiles):
            # Only this level set codes keys before their rotation.
            tables = engine.rotary_tables(geometry.context_tokens)
            rotary = Rotary(
                tables.cos,
                tables.sin,
                tables.table_of_layer.astype(np.int64),
                tables.interleaved,
            )
        return Codec(
            Geometry(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim),
            model_digest=model_digest,
            profiles=profiles,
            num_threads=num_threads,
            rotary=rotary,
        )
    except (OSError, CodecError, EngineError) as error:
        raise ConfigError(f"profiles: {error}") from error
