"""A Llama-architecture GGUF file to a transformers folder: exact de-quantization to float32.

Owns the name map and the order of rotary rows. Written against the `gguf` package alone: transformers' own
loader needs another large dependency and several times the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import WeightsError

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_llama_gguf(
    gguf_path: Path, folder: Path, *, on_tensor: Callable[[int, int], None]
) -> None:
    """Write config.json, model.safetensors and the tokenizer's files of a GGUF model.

    Args:
        gguf_path: the GGUF file, architecture `llama`.
        folder: an existing folder to fill.
        on_tensor: called with (done, total) after each tensor.

    Raises:
        WeightsError: another architecture or a tensor without a known name.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(str(gguf_path))
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise WeightsError(f"{gguf_path.name} has architecture '{architecture}', not 'llama'")
    num_heads = int(_field(reader, "llama.attention.head_count"))
    num_kv_heads = int(_field(reader, "llama.attention.head_count_kv"))
    tensors: dict[str, NDArray[np.float32]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name.endswith("attn_q.weight"):
            values = _unpermute(values, num_heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = _unpermute(values, num_kv_heads)
        tensors[_hf_name(tensor.name)] = np.ascontiguousarray(values)
        on_tensor(done, len(reader.tensors))
    config = _config(reader, tied="lm_head.weight" not in tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _save_tokenizer(gguf_path, folder)


def _unpermute(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo GGUF's interleaving of the rotary halves of Q and K rows.

    Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    half = weights.shape[0] // num_heads // 2
    return weights.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(weights.shape)


def _hf_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    prefix, _, rest = name.partition(".")
    index, _, leaf = rest.partition(".")
    if prefix != "blk" or leaf not in _BLOCK_NAMES:
        raise WeightsError(f"GGUF tensor '{name}' has no place in a Llama model")
    return f"model.layers.{index}.{_BLOCK_NAMES[leaf]}"


def _field(reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    if field is None:
        raise WeightsError(f"GGUF metadata has no '{key}'")
    return field.contents()


def _config(reader: Any, *, tied: bool) -> dict[str, Any]:
    heads = int(_field(reader, "llama.attention.head_count"))
    hidden = int(_field(reader, "llama.embedding_length"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": int(_field(reader, "tokenizer.ggml.bos_token_id")),
        "dtype": "float32",
        "eos_token_id": int(_field(reader, "tokenizer.ggml.eos_token_id")),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(_field(reader, "llama.feed_forward_length")),
        "max_position_embeddings": int(_field(reader, "llama.context_length")),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(_field(reader, "llama.block_count")),
        "num_key_value_heads": int(_field(reader, "llama.attention.head_count_kv")),
        "pad_token_id": int(_field(reader, "tokenizer.ggml.padding_token_id")),
        "rms_norm_eps": float(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_theta": float(_field(reader, "llama.rope.freq_base")),
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "vocab_size": int(_field(reader, "llama.vocab_size")),
    }


def _save_tokenizer(gguf_path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    tokenizer.save_pretrained(str(folder))
