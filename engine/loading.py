"""From a model's name to a ready `TorchEngine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine import attention
from engine.catalog import cache_root, resolve_model
from engine.errors import DeviceUnavailable, UnsupportedModel, WeightsError
from engine.geometry import KvGeometry, geometry_of, text_config
from engine.identity import identify
from engine.tokenizer import Tokenizer
from engine.torch_engine import TorchEngine

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_engine(
    model: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    num_threads: int | None = None,
    cache_dir: Path | None = None,
    progress: bool = True,
) -> TorchEngine:
    """Load a model, fetching and converting it first if it is a catalog model seen for the first time.

    Args:
        model: a catalog name (`smollm2-135m`), a folder, or a Hugging Face id.
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: `float32` or `bfloat16`.
        num_threads: CPU threads of torch for the whole process; None leaves torch's setting.
        cache_dir: folder of converted weights; None takes KVTIDE_CACHE or ~/.cache/kvtide.
        progress: show a progress bar on stderr while weights are prepared.

    Raises:
        UnknownModel: nothing of that name.
        UnsupportedModel: its KV state is not plain K and V rows.
        WeightsError: the weights could not be fetched or read.
        TokenizerError: it has no usable tokenizer.
        DeviceUnavailable: no such device here.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype '{dtype}' is neither float32 nor bfloat16")
    target = _device(device)
    if num_threads is not None:
        if num_threads < 1:
            raise ValueError(f"num_threads {num_threads} is not positive")
        torch.set_num_threads(num_threads)
    folder = resolve_model(model, cache_dir=cache_dir, progress=progress)
    config = _config(model, folder)
    geometry = geometry_of(config, name=model)
    tokenizer = Tokenizer.load(folder)
    identity = identify(
        folder,
        tokenizer_json=tokenizer.serialized(),
        dtype=dtype,
        sidecar_dir=cache_root(cache_dir) / "digests",
    )
    implementation = _attention_for(config, geometry, target)
    loaded = _model(model, folder, config, _DTYPES[dtype], implementation).to(target).eval()
    return TorchEngine(loaded, tokenizer, geometry=geometry, identity=identity, name=model)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceUnavailable(name, "torch does not know it") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceUnavailable(name, "only cpu and cuda are supported")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise DeviceUnavailable(name, f"torch sees {count} CUDA devices")
    return device


def _attention_for(config: Any, geometry: KvGeometry, device: torch.device) -> str:
    """Choose the fastest attention that computes this model exactly."""
    cfg = text_config(config)
    if getattr(cfg, "attn_logit_softcapping", None):
        return "eager"  # sdpa cannot cap scores
    has_sliding_layers = any(geometry.sliding_layers)
    if device.type == "cpu" and attention.is_supported(cfg, has_sliding_layers=has_sliding_layers):
        attention.register()
        return attention.NAME
    return "sdpa"


def _config(name: str, folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(name, f"transformers cannot read its config: {error}") from error


def _model(name: str, folder: Path, config: Any, dtype: torch.dtype, implementation: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    transformers_logging: Any = logging  # its functions carry no types
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            attn_implementation=implementation,
            local_files_only=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(f"the weights of '{name}' do not load: {first}") from error
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
