"""What a model's KV cache looks like: layers, heads, widths, windows and rotary kinds.

Owns the reading of a transformers config; every other module asks a `KvGeometry`. Models whose state is
not one K row and one V row of equal width per token, layer and head are refused here, with a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import UnsupportedModel

# Layer kinds whose state is exactly one K and one V row per token. A chunked-attention or recurrent layer
# keeps something else, and a layer that shares another layer's KV would be sent twice.
_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})

# Model types that rotate neighbouring pairs (2i, 2i+1) instead of halves (i, i + dim/2).
_INTERLEAVED_MODEL_TYPES = frozenset({"cohere", "cohere2", "glm", "glm4", "helium", "ernie4_5"})


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of one model's KV cache."""

    num_layers: int
    """Number of layers that hold KV."""
    num_kv_heads: int
    """K and V heads per layer (1 = MQA)."""
    head_dim: int
    """Elements per head, the same for K and V."""
    context_tokens: int
    """Longest sequence the model was built for, tokens."""
    vocab_size: int
    """Width of the logits."""
    num_query_heads: int
    """Query heads per layer; a multiple of `num_kv_heads`."""
    rotary_dim: int
    """Leading elements of a head that RoPE turns; 0 when the model has no RoPE."""
    rotary_interleaved: bool
    """True when RoPE turns neighbouring pairs, False when it turns halves."""
    rope_kinds: tuple[str, ...]
    """Distinct RoPE types in use, such as `("default",)` or `("default", "linear")`."""
    sliding_window_tokens: int | None
    """Window of the sliding layers, tokens, or None."""
    sliding_layers: tuple[bool, ...]
    """Per layer: True when it attends only within the window."""
    has_qk_norm: bool
    """True when K is normalised before RoPE, so K's scale is bounded by the norm's weight."""

    @property
    def elements_per_token(self) -> int:
        """Number of K and V values that one token adds."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    def num_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of KV that one token adds at the given element size."""
        return self.elements_per_token * bytes_per_element


def text_config(config: Any) -> Any:
    """Return the decoder's own config of a possibly multimodal config."""
    getter = getattr(config, "get_text_config", None)
    return getter() if getter is not None else config


def geometry_of(config: Any, *, name: str) -> KvGeometry:
    """Read the KV geometry out of a transformers config.

    Args:
        config: a `PreTrainedConfig`.
        name: the model's name, for error messages.

    Returns:
        The geometry; `head_dim` is derived from the hidden size when the config leaves it None.

    Raises:
        UnsupportedModel: MLA, linear attention, state-space, chunked attention, shared KV, encoder-decoder,
            or widths that differ per layer.
    """
    cfg = text_config(config)
    _refuse_foreign_state(config, cfg, name)
    num_layers = _positive(cfg, "num_hidden_layers", name)
    num_query_heads = _positive(cfg, "num_attention_heads", name)
    num_kv_heads = int(getattr(cfg, "num_key_value_heads", None) or num_query_heads)
    if num_query_heads % num_kv_heads:
        raise UnsupportedModel(
            name, f"{num_query_heads} query heads do not divide over {num_kv_heads} KV heads"
        )
    head_dim = int(getattr(cfg, "head_dim", None) or 0)
    if (getattr(cfg, "global_head_dim", None) or head_dim) != head_dim:
        raise UnsupportedModel(name, "its layers have heads of different widths")
    if not head_dim:
        hidden = _positive(cfg, "hidden_size", name)
        if hidden % num_query_heads:
            raise UnsupportedModel(
                name, f"hidden size {hidden} does not divide over {num_query_heads} heads"
            )
        head_dim = hidden // num_query_heads
    kinds = layer_kinds(cfg, num_layers)
    foreign = sorted(set(kinds) - _ATTENTION_KINDS)
    if foreign:
        raise UnsupportedModel(
            name, f"its '{foreign[0]}' layers keep a state other than one K and one V row per token"
        )
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    window = int(cfg.sliding_window) if any(sliding) else None
    rope_parameters = rope_parameters_by_kind(cfg)
    return KvGeometry(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_tokens=_context_tokens(cfg, rope_parameters, name),
        vocab_size=_positive(cfg, "vocab_size", name),
        num_query_heads=num_query_heads,
        rotary_dim=_rotary_dim(cfg, head_dim, rope_parameters),
        rotary_interleaved=str(cfg.model_type) in _INTERLEAVED_MODEL_TYPES,
        rope_kinds=tuple(
            sorted({str(p.get("rope_type", "default")) for p in rope_parameters.values()})
        ),
        sliding_window_tokens=window,
        sliding_layers=sliding,
        has_qk_norm=_has_qk_norm(cfg),
    )


def layer_kinds(cfg: Any, num_layers: int) -> tuple[str, ...]:
    """Return transformers' attention kind of every layer."""
    kinds = getattr(cfg, "layer_types", None)
    if kinds:
        return tuple(str(kind) for kind in kinds)
    # Mistral: one window for all layers, no list.
    uses_window = getattr(cfg, "sliding_window", None) is not None and getattr(
        cfg, "use_sliding_window", True
    )
    return ("sliding_attention" if uses_window else "full_attention",) * num_layers


def rope_parameters_by_kind(cfg: Any) -> dict[str, dict[str, Any]]:
    """Return RoPE parameters per layer kind; models with one RoPE use the key `all`."""
    parameters = getattr(cfg, "rope_parameters", None)
    if not parameters:
        return {}
    if "rope_type" in parameters or "rope_theta" in parameters:
        return {"all": dict(parameters)}
    return {str(kind): dict(value) for kind, value in parameters.items() if value}


def _refuse_foreign_state(config: Any, cfg: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            name, "it is an encoder-decoder, and only decoders have one KV cache"
        )
    if getattr(cfg, "kv_lora_rank", None):
        raise UnsupportedModel(
            name, "its multi-head latent attention (MLA) keeps a latent instead of K and V rows"
        )
    recurrent = ("linear_num_value_heads", "mamba_d_state", "ssm_state_size", "state_size")
    if any(getattr(cfg, field, None) for field in recurrent):
        raise UnsupportedModel(
            name, "its linear-attention or state-space layers keep a recurrent state, not K and V"
        )
    if getattr(cfg, "num_kv_shared_layers", None):
        raise UnsupportedModel(name, "its layers share one another's KV")
    if getattr(cfg, "attention_chunk_size", None):
        raise UnsupportedModel(name, "its chunked-attention layers forget tokens at chunk borders")


def _positive(cfg: Any, field: str, name: str) -> int:
    value = getattr(cfg, field, None)
    if not isinstance(value, int) or value <= 0:
        raise UnsupportedModel(name, f"its config has no positive '{field}'")
    return value


def _rotary_dim(cfg: Any, head_dim: int, parameters: dict[str, dict[str, Any]]) -> int:
    if not parameters:
        return 0
    # transformers 5 keeps the factor with the other RoPE parameters, older configs beside them.
    factors = {
        float(p.get("partial_rotary_factor") or getattr(cfg, "partial_rotary_factor", None) or 1.0)
        for p in parameters.values()
    }
    return int(head_dim * max(factors))


def _context_tokens(cfg: Any, parameters: dict[str, dict[str, Any]], name: str) -> int:
    limit = _positive(cfg, "max_position_embeddings", name)
    for p in parameters.values():
        if p.get("rope_type") == "longrope":
            # Beyond the original window LongRoPE changes the angles of all tokens, those already cached
            # too: KV computed before and after would not belong together.
            limit = min(limit, int(p.get("original_max_position_embeddings") or limit))
    return limit


def _has_qk_norm(cfg: Any) -> bool:
    # transformers has no common flag: these families build a k_norm unconditionally.
    always = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3")
    return str(cfg.model_type) in always or bool(
        getattr(cfg, "use_qk_norm", False) or getattr(cfg, "qk_layernorm", False)
    )
