"""Runs a model over calibration texts for a `klt` profile. Part of the command-line shell.

What takes long (prefill and gradients) is kept per context in a work folder, so that an interrupted build goes
on where it stopped.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from codec.calibrate_klt import Context, KltCalibration
from codec.geometry import Geometry
from codec.profile import Profile
from codec.texts import CalibrationText

__all__ = [
    "CONTEXT_TOKENS",
    "CONTINUATION_TOKENS",
    "CalibratedModel",
    "ContextPlan",
    "build_klt",
    "plan_contexts",
    "warnings_about",
]

CONTEXT_TOKENS = 1536
CONTINUATION_TOKENS = 256
CONTEXTS_PER_TEXT = 5
COUNTED_EVERY = 3
"""Distributions are taken from every third context: they are shared by all components of a scale class."""

FEW_CONTEXTS = 12
FEW_TEXTS = 3

F32 = npt.NDArray[np.float32]
Track = Callable[[Sequence[Any], str], Iterator[Any]]


class CalibratedModel(Protocol):
    """A language model, as far as calibration goes."""

    def keys_values_gradients(
        self, head: Sequence[int], tail: Sequence[int], *, seed: int
    ) -> tuple[F32, F32]:
        """Return float32 [layer, 2, token, head, dim] twice.

        Keys before rotation and values of the tokens `head`, and the gradient with respect to them of the
        log-likelihood of tokens drawn from the model after each token of `tail`.
        """
        ...


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """One calibration context."""

    text: str
    """The name of the text that it comes from."""

    token_ids: tuple[int, ...]
    """CONTEXT_TOKENS + CONTINUATION_TOKENS of them."""

    @property
    def key(self) -> str:
        """Names the context in the work folder."""
        return blake3(np.asarray(self.token_ids, np.int32).tobytes()).hexdigest()[:24]


def plan_contexts(
    texts: Sequence[CalibrationText], encode: Callable[[str], Sequence[int]]
) -> list[ContextPlan]:
    """Cut texts into contexts, at most CONTEXTS_PER_TEXT from each, spread over it.

    Args:
        texts: calibration texts.
        encode: from text to token ids.
    """
    length = CONTEXT_TOKENS + CONTINUATION_TOKENS
    by_text = []
    for text in texts:
        ids = list(encode(text.text))
        whole = len(ids) // length
        picked = sorted(
            {
                int(i * whole / min(whole, CONTEXTS_PER_TEXT))
                for i in range(min(whole, CONTEXTS_PER_TEXT))
            }
        )
        by_text.append(
            [ContextPlan(text.name, tuple(ids[i * length : (i + 1) * length])) for i in picked]
        )
    # Text by text in turn, so that any prefix of the list is a mix.
    longest = max((len(contexts) for contexts in by_text), default=0)
    return [contexts[i] for i in range(longest) for contexts in by_text if i < len(contexts)]


def build_klt(
    model: CalibratedModel,
    geometry: Geometry,
    plans: Sequence[ContextPlan],
    *,
    work: Path,
    model_digest: bytes,
    notes: dict[str, Any],
    track: Track,
) -> Profile:
    """Return a profile whose levels are not yet measured.

    Args:
        model: runs the contexts.
        geometry: of its cache.
        plans: what to calibrate on, at least one.
        work: folder for what takes long; contexts found there are not computed again.
        model_digest: 32 bytes.
        notes: goes into the profile, beside the contexts' origins.
        track: wraps a list to show progress.
    """
    calibration = KltCalibration(geometry)
    work.mkdir(parents=True, exist_ok=True)
    for plan in track(plans, "prefill and gradients"):
        calibration.add_moments(_context(model, plan, work))
    for plan in track(plans, "sensitivity"):
        calibration.add_sensitivity(_context(model, plan, work))
    counter = calibration.start_counts()
    counted = plans[::COUNTED_EVERY]
    for plan in track(counted, "magnitudes"):
        counter.add_magnitudes(_context(model, plan, work))
    counter.finish_magnitudes()
    for plan in track(counted, "distributions"):
        counter.add_counts(_context(model, plan, work))
    origins: dict[str, int] = {}
    for plan in plans:
        origins[plan.text] = origins.get(plan.text, 0) + 1
    return counter.build(
        model_digest=model_digest,
        notes={
            **notes,
            "contexts": [[name, count] for name, count in origins.items()],
            "context_tokens": CONTEXT_TOKENS,
        },
    )


def warnings_about(plans: Sequence[ContextPlan]) -> list[str]:
    """Return what too little or too uniform text will cost, in sentences."""
    out = []
    if len(plans) < FEW_CONTEXTS:
        out.append(
            f"{len(plans)} contexts of {CONTEXT_TOKENS} tokens; with 4 instead of 12 bitstreams grow by about "
            "a fifth, with 1 they triple"
        )
    if len({plan.text for plan in plans}) < FEW_TEXTS:
        out.append(
            "fewer than three calibration texts; a profile of one kind of text costs 10 to 40 % more bytes on "
            "other kinds"
        )
    return out


def _context(model: CalibratedModel, plan: ContextPlan, work: Path) -> Context:
    path = work / f"{plan.key}.npz"
    if not path.exists():
        head, tail = plan.token_ids[:CONTEXT_TOKENS], plan.token_ids[CONTEXT_TOKENS:]
        seed = zlib.crc32(plan.key.encode())
        kv, gradient = model.keys_values_gradients(head, tail, seed=seed)
        # A gradient's square must not underflow in half precision: its largest number becomes 2^10.
        scale = np.float32(1024 / max(float(np.abs(gradient).max()), 1e-30))
        partial = path.with_suffix(".partial.npz")
        np.savez(
            partial,
            kv=kv.astype(np.float16),
            gradient=(gradient * scale).astype(np.float16),
            scale=scale,
        )
        partial.replace(path)
    with np.load(path, allow_pickle=False) as arrays:
        kv = arrays["kv"].astype(np.float32)
        gradient = arrays["gradient"].astype(np.float32) / arrays["scale"]
    shape = (*kv.shape[:3], -1)
    return Context(kv.reshape(shape), gradient.reshape(shape), CONTINUATION_TOKENS)
