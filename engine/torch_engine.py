"""The default engine: PyTorch and transformers, on CPU or CUDA.

Owns one loaded model. Prefill runs in pieces on top of whatever KV the cache already holds, whoever put it
there. Knows nothing of chunks, levels or the network.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from engine.errors import ContextTooLong, EngineError
from engine.geometry import KvGeometry, text_config
from engine.identity import ModelIdentity
from engine.kv_cache import KvCache, TransformersView
from engine.rope import RotaryTables
from engine.rotary_probe import (
    PROBE_SHIFT,
    PROBE_TOKENS,
    prove_rotation,
    read_tables,
    with_identity,
)
from engine.sampling import Sampling, choose_token
from engine.tokenizer import Tokenizer

F32Array = NDArray[np.float32]

PREFILL_PIECE_TOKENS = 512
"""Tokens per forward pass of a prefill: bounds the memory of activations and attention masks."""


class TorchEngine:
    """A loaded model. Different caches may be used from different threads."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        geometry: KvGeometry,
        identity: ModelIdentity,
        name: str,
    ) -> None:
        """Wrap a loaded transformers causal language model in eval mode; use `load_engine` instead."""
        self.name = name
        """The name that the model was loaded by."""
        self.tokenizer = tokenizer
        """The model's tokenizer."""
        self.identity = identity
        """Digests of everything that changes KV values."""
        self.geometry = geometry
        """Shape of the KV cache."""
        self._model = model
        self._decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
        self._device = next(model.parameters()).device
        self._dtype: torch.dtype = next(model.parameters()).dtype
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument in 5.20 and warns about the old name.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._logits_argument = (
            "logits_to_keep" if "logits_to_keep" in parameters else "num_logits_to_keep"
        )
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        """Tokens that end an answer."""
        self._rotary_lock = threading.Lock()
        self._rotary: RotaryTables | None = None
        self._unturned_layers: tuple[bool, ...] | None = None

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return torch.device(self._device)

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self._dtype

    @property
    def model(self) -> Any:
        """The transformers model, for calibration."""
        return self._model

    def new_cache(self, capacity_tokens: int) -> KvCache:
        """Allocate a KV cache for one sequence.

        Raises:
            ContextTooLong: more than the model's context window.
        """
        return KvCache(self.geometry, capacity_tokens, dtype=self._dtype, device=self._device)

    def fill(
        self,
        cache: KvCache,
        token_ids: Sequence[int],
        start: int = 0,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Compute the KV of tokens into the cache, without logits.

        Args:
            cache: holds the KV of positions 0 to `start`.
            token_ids: tokens at positions `start` and up.
            start: position of the first token.
            on_progress: called with the number of tokens done after each piece; may raise to cancel.

        Raises:
            ContextTooLong: the tokens do not fit the cache.
        """
        self._check(cache, token_ids, start)
        view = cache.view(start)
        done = 0
        for piece in _pieces(token_ids):
            self._forward(self._decoder, view, piece, start + done)
            done += len(piece)
            if on_progress is not None:
                on_progress(done)

    def prefill(
        self,
        cache: KvCache,
        token_ids: Sequence[int],
        start: int = 0,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> F32Array:
        """Compute the KV of tokens into the cache and the logits that follow the last one.

        Args:
            cache: holds the KV of positions 0 to `start`.
            token_ids: at least one token, at positions `start` and up.
            start: position of the first token.
            on_progress: called with the number of tokens done after each piece; may raise to cancel.

        Returns:
            float32 [vocab].

        Raises:
            ContextTooLong: the tokens do not fit the cache.
        """
        self._check(cache, token_ids, start)
        view = cache.view(start)
        pieces = _pieces(token_ids)
        done = 0
        for piece in pieces[:-1]:
            self._forward(self._decoder, view, piece, start + done)
            done += len(piece)
            if on_progress is not None:
                on_progress(done)
        logits = self._logits(view, pieces[-1], start + done, keep=1)[-1]
        if on_progress is not None:
            on_progress(len(token_ids))
        return _to_numpy(logits)

    def prefill_logits(self, cache: KvCache, token_ids: Sequence[int], start: int = 0) -> F32Array:
        """Like `prefill`, with the logits after every token.

        Returns:
            float32 [token, vocab].
        """
        self._check(cache, token_ids, start)
        view = cache.view(start)
        out = np.empty((len(token_ids), self.geometry.vocab_size), dtype=np.float32)
        done = 0
        for piece in _pieces(token_ids):
            logits = self._logits(view, piece, start + done, keep=0)
            out[done : done + len(piece)] = _to_numpy(logits)
            done += len(piece)
        return out

    def generate(
        self,
        cache: KvCache,
        first_logits: F32Array,
        start: int,
        sampling: Sampling,
        max_tokens: int,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> Iterator[int]:
        """Generate tokens one by one.

        The next token is computed only when it is asked for, so the first one costs nothing and closing
        the iterator stops the work. An end-of-sequence or stop token ends it and is not yielded.

        Args:
            cache: holds the KV of positions 0 to `start`.
            first_logits: float32 [vocab], what `prefill` returned.
            start: position of the first generated token.
            sampling: how tokens are chosen.
            max_tokens: most tokens to yield; the cache's capacity also ends the answer.
            stop_token_ids: ends the answer, besides `eos_token_ids`.
        """
        ends = self.eos_token_ids | stop_token_ids
        generator = np.random.default_rng(sampling.seed)
        view = cache.view(start)
        token_id = choose_token(first_logits, sampling, generator)
        for position in range(start, start + max_tokens):
            if token_id in ends:
                return
            yield token_id
            if position + 1 == start + max_tokens or position >= cache.capacity_tokens:
                return
            logits = self._logits(view, [token_id], position, keep=1)[-1]
            if sampling.temperature == 0.0:
                token_id = int(logits.argmax())  # on the device: no copy of the vocabulary
            else:
                token_id = choose_token(_to_numpy(logits), sampling, generator)

    def layer0_kv(self, token_ids: Sequence[int]) -> F32Array:
        """Compute layer 0's K before RoPE and V, which depend on the token ids alone.

        Returns:
            float32 [2, token, head, dim].

        Raises:
            UnsupportedModel: the model has no RoPE, or one that is not understood.
        """
        self._check_ids(token_ids)
        tables = self.rotary_tables(1)
        out = self._scaled_layer0(token_ids)
        out[0, :, :, : self.geometry.rotary_dim] /= tables.scaling[tables.table_of_layer[0]]
        return out

    def rotary_tables(self, num_positions: int) -> RotaryTables:
        """Return the model's rotary tables for positions 0 to `num_positions`.

        The first call runs the model three times on a few tokens to prove that the tables are right.

        Raises:
            UnsupportedModel: un-rotating this model's keys with them does not give the keys before RoPE.
        """
        if num_positions > self.geometry.context_tokens:
            raise ContextTooLong(
                num_tokens=num_positions, limit_tokens=self.geometry.context_tokens
            )
        with self._rotary_lock:
            if self._unturned_layers is None:
                self._unturned_layers = self._prove_rotation()
            if self._rotary is None or self._rotary.num_positions < num_positions:
                self._rotary = with_identity(self._raw_tables(num_positions), self._unturned_layers)
            return self._rotary.first(num_positions)

    def _scaled_layer0(self, token_ids: Sequence[int]) -> F32Array:
        """Layer 0's K and V as the model hands them to its cache at position 0, where RoPE only scales."""
        g = self.geometry
        out = np.empty((2, len(token_ids), g.num_kv_heads, g.head_dim), dtype=np.float32)
        done = 0
        for piece in _pieces(token_ids):
            capture = _CaptureLayer0()
            positions = torch.zeros((1, len(piece)), dtype=torch.long, device=self._device)
            with contextlib.suppress(_LayerCaptured):
                self._call(self._decoder, capture, piece, positions)
            span = slice(done, done + len(piece))
            for index, tensor in enumerate(capture.captured()):
                out[index, span] = _to_numpy(tensor[0].transpose(0, 1))
            done += len(piece)
        return out

    def _raw_tables(self, num_positions: int) -> RotaryTables:
        return read_tables(
            self._decoder,
            text_config(self._model.config),
            self.geometry,
            num_positions,
            device=self._device,
            name=self.name,
        )

    def _prove_rotation(self) -> tuple[bool, ...]:
        token_ids = [(7 * i + 3) % self.geometry.vocab_size for i in range(PROBE_TOKENS)]
        tables = self._raw_tables(PROBE_TOKENS + PROBE_SHIFT)
        keys = []
        for shift in (0, PROBE_SHIFT):
            cache = self.new_cache(PROBE_TOKENS)
            # RoPE is relative: moving all tokens by the same distance turns the keys and nothing else
            positions = torch.arange(shift, shift + PROBE_TOKENS, device=self._device)[None]
            self._call(self._decoder, cache.view(0), token_ids, positions)
            keys.append(cache.read(0, PROBE_TOKENS)[:, 0].astype(np.float32))
        layer0 = self._scaled_layer0(token_ids)[0]
        return prove_rotation(tables, layer0, keys[0], keys[1], name=self.name)

    def _logits(
        self, view: TransformersView, token_ids: Sequence[int], start: int, *, keep: int
    ) -> torch.Tensor:
        output = self._forward(self._model, view, token_ids, start, {self._logits_argument: keep})
        logits: torch.Tensor = output.logits[0]
        return logits

    def _forward(
        self,
        module: Any,
        view: Cache,
        token_ids: Sequence[int],
        start: int,
        extra: dict[str, int] | None = None,
    ) -> Any:
        positions = torch.arange(start, start + len(token_ids), device=self._device)[None]
        return self._call(module, view, token_ids, positions, extra)

    def _call(
        self,
        module: Any,
        view: Cache,
        token_ids: Sequence[int],
        positions: torch.Tensor,
        extra: dict[str, int] | None = None,
    ) -> Any:
        ids = torch.tensor([list(token_ids)], dtype=torch.long, device=self._device)
        arguments: dict[str, Any] = {self._cache_argument: view, "use_cache": True, **(extra or {})}
        with torch.inference_mode():
            return module(input_ids=ids, position_ids=positions, **arguments)

    def _check(self, cache: KvCache, token_ids: Sequence[int], start: int) -> None:
        if cache.geometry != self.geometry:
            raise EngineError(f"the cache belongs to another model than '{self.name}'")
        stop = start + len(token_ids)
        if stop > cache.capacity_tokens:
            raise ContextTooLong(
                num_tokens=stop, limit_tokens=cache.capacity_tokens, what="KV cache"
            )
        self._check_ids(token_ids)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise EngineError("there are no tokens to prefill")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.geometry.vocab_size:
            bad = low if low < 0 else high
            raise EngineError(
                f"token id {bad} is outside the vocabulary of {self.geometry.vocab_size}"
            )


class _LayerCaptured(Exception):  # control flow, not an error
    """Unwinds the forward pass as soon as layer 0 has its K and V."""


class _CaptureLayer0(Cache):
    """A cache that takes layer 0's K and V and ends the forward pass there."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._kv: tuple[torch.Tensor, torch.Tensor] | None = None

    def captured(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, each [batch=1, head, token, dim]."""
        if self._kv is None:
            raise EngineError("the model never offered layer 0's K and V to its cache")
        return self._kv

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._kv = (key_states, value_states)
        raise _LayerCaptured


def _pieces(token_ids: Sequence[int]) -> list[Sequence[int]]:
    return [
        token_ids[i : i + PREFILL_PIECE_TOKENS]
        for i in range(0, len(token_ids), PREFILL_PIECE_TOKENS)
    ]


def _to_numpy(tensor: torch.Tensor) -> F32Array:
    array: F32Array = tensor.detach().to(device="cpu", dtype=torch.float32).numpy()
    return array


def _eos_token_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), text_config(model.config)):
        value = getattr(config, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif value:
            found.update(int(token_id) for token_id in value)
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)
