"""What a program may ask of an engine, whichever runtime is behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.geometry import KvGeometry
from engine.identity import ModelIdentity
from engine.kv_cache import KvCache
from engine.rope import RotaryTables
from engine.sampling import Sampling
from engine.tokenizer import Tokenizer

F32Array = NDArray[np.float32]


class Engine(Protocol):
    """One loaded model; `TorchEngine` documents each method."""

    name: str
    tokenizer: Tokenizer
    identity: ModelIdentity
    geometry: KvGeometry
    eos_token_ids: frozenset[int]

    def new_cache(self, capacity_tokens: int) -> KvCache: ...

    def fill(
        self,
        cache: KvCache,
        token_ids: Sequence[int],
        start: int = 0,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> None: ...

    def prefill(
        self,
        cache: KvCache,
        token_ids: Sequence[int],
        start: int = 0,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> F32Array: ...

    def prefill_logits(
        self, cache: KvCache, token_ids: Sequence[int], start: int = 0
    ) -> F32Array: ...

    def generate(
        self,
        cache: KvCache,
        first_logits: F32Array,
        start: int,
        sampling: Sampling,
        max_tokens: int,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> Iterator[int]: ...

    def layer0_kv(self, token_ids: Sequence[int]) -> F32Array: ...

    def rotary_tables(self, num_positions: int) -> RotaryTables: ...
