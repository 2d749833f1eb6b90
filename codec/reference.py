"""Slow, obvious NumPy oracle: what the kernels must produce, byte for byte. Never optimised.

Arrays of one block have shape [token, dim]. All float arithmetic is float32, one operation at a time,
rounded to nearest even, which is what the kernels are compiled to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec.geometry import FloatArray

__all__ = [
    "OracleChannel",
    "OracleRun",
    "decode_cachegen_block",
    "decode_fp16_block",
    "decode_int8_block",
    "decode_symbols",
    "encode_cachegen_block",
    "encode_fp16_block",
    "encode_int8_block",
    "encode_symbols",
    "to_half",
]

F32 = npt.NDArray[np.float32]
F16 = npt.NDArray[np.float16]

HALF_MAX = np.float32(65504.0)
INT8_MAX = np.float32(127.0)


def to_half(values: F32) -> F16:
    """Round float32 to float16, nearest even, saturating at the largest finite number."""
    return np.clip(values, -HALF_MAX, HALF_MAX).astype(np.float16)


def encode_fp16_block(block: FloatArray) -> bytes:
    """Return the values as little-endian float16, token after token."""
    return to_half(block.astype(np.float32)).astype("<f2").tobytes()


def decode_fp16_block(data: bytes, num_tokens: int, head_dim: int) -> F32:
    """Undo `encode_fp16_block`; returns float32 [token, dim]."""
    return np.frombuffer(data, "<f2").reshape(num_tokens, head_dim).astype(np.float32)


def encode_int8_block(block: FloatArray) -> bytes:
    """Return float16 scales [token], then int8 symbols [token, dim].

    The scale is absmax / 127, rounded up where rounding to float16 would make the largest value clip.
    It is 0 for a row of zeros.
    """
    values = block.astype(np.float32)
    absmax = np.abs(values).max(axis=1)
    scale = to_half(absmax / INT8_MAX)
    too_small = scale.astype(np.float32) * INT8_MAX < absmax
    scale[too_small] = np.nextafter(scale[too_small], np.float16(np.inf))
    step = scale.astype(np.float32)[:, None]
    symbols = np.rint(np.divide(values, step, out=np.zeros_like(values), where=step > 0))
    symbols = np.clip(symbols, -INT8_MAX, INT8_MAX)
    return scale.astype("<f2").tobytes() + symbols.astype(np.int8).tobytes()


def decode_int8_block(data: bytes, num_tokens: int, head_dim: int) -> F32:
    """Undo `encode_int8_block`; returns float32 [token, dim]."""
    scale = np.frombuffer(data, "<f2", count=num_tokens).astype(np.float32)
    symbols = np.frombuffer(data, np.int8, offset=2 * num_tokens).reshape(num_tokens, head_dim)
    return symbols.astype(np.float32) * scale[:, None]


# ---- the entropy coder ------------------------------------------------------------------------------------

STATE_LOW = 1 << 16


@dataclass(frozen=True, slots=True)
class OracleRun:
    """A run of symbols with its table."""

    frequencies: list[int]
    """Summing to 4096; the last one is the escape's."""

    low: int
    """Value of the first symbol, the run's shift included."""

    shift: int
    values: list[int]
    """What is coded; when decoding, only its length counts."""


def encode_symbols(runs: list[OracleRun], num_lanes: int) -> bytes:
    """Encode a block the way a decoder will read it, backwards.

    Source: docs/bitstream.md, "The coder".
    """
    states = [STATE_LOW] * num_lanes
    words: list[int] = []  # in reverse order of reading
    for run in reversed(runs):
        escape = len(run.frequencies) - 1
        num_steps = -(-len(run.values) // num_lanes)
        for step in reversed(range(num_steps)):
            values = run.values[step * num_lanes : (step + 1) * num_lanes]
            index = [v - run.low if 0 <= v - run.low < escape else escape for v in values]
            for lane in reversed(range(len(values))):
                if index[lane] == escape:
                    words.append(states[lane] & 0xFFFF)
                    raw = (values[lane] - run.shift) & 0xFFFF
                    states[lane] = states[lane] >> 16 << 16 | raw
            for lane in reversed(range(len(values))):
                frequency = run.frequencies[index[lane]]
                cumulative = sum(run.frequencies[: index[lane]])
                state = states[lane]
                if state >= frequency << 20:
                    words.append(state & 0xFFFF)
                    state >>= 16
                states[lane] = (state // frequency << 12) + state % frequency + cumulative
    head = [half for state in states for half in (state & 0xFFFF, state >> 16)]
    return np.asarray(head + words[::-1], "<u2").tobytes()


def decode_symbols(data: bytes, runs: list[OracleRun], num_lanes: int) -> list[list[int]]:
    """Undo `encode_symbols`; returns the values of each run. Valid data only."""
    words = [int(word) for word in np.frombuffer(data, "<u2")]
    states = [words[2 * lane] | words[2 * lane + 1] << 16 for lane in range(num_lanes)]
    del words[: 2 * num_lanes]
    decoded = []
    for run in runs:
        escape = len(run.frequencies) - 1
        values: list[int] = []
        while len(values) < len(run.values):
            active = min(num_lanes, len(run.values) - len(values))
            escaped = []
            for lane in range(active):
                slot = states[lane] & 4095
                index, cumulative = 0, 0
                while cumulative + run.frequencies[index] <= slot:
                    cumulative += run.frequencies[index]
                    index += 1
                states[lane] = run.frequencies[index] * (states[lane] >> 12) + slot - cumulative
                if states[lane] < STATE_LOW:
                    states[lane] = states[lane] << 16 | words.pop(0)
                values.append(run.low + index)
                if index == escape:
                    escaped.append((lane, len(values) - 1))
            for lane, place in escaped:
                raw = (states[lane] & 0xFFFF) + run.shift & 0xFFFF
                values[place] = raw - 0x10000 if raw >= 0x8000 else raw
                states[lane] = states[lane] >> 16 << 16 | words.pop(0)
        decoded.append(values)
    assert not words
    assert states == [STATE_LOW] * num_lanes
    return decoded


# ---- cachegen ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OracleChannel:
    """Statistics of one channel at one level."""

    anchor_step: np.float32
    delta_step: np.float32
    anchor_low: int
    anchor_shift: int
    anchor_frequencies: list[int]
    delta_low: int
    delta_frequencies: list[int]


def encode_cachegen_block(
    block: FloatArray, channels: list[OracleChannel], num_lanes: int
) -> bytes:
    """Encode one block [token, dim], channel after channel: its anchors, then its deltas."""
    runs: list[OracleRun] = []
    for values, channel in zip(block.astype(np.float32).T, channels, strict=True):
        anchors, deltas = [], []
        anchor_value = np.float32(0)
        for token, value in enumerate(values):
            if token % 10 == 0:
                anchors.append(_symbol(value, channel.anchor_step))
                anchor_value = np.float32(anchors[-1]) * channel.anchor_step
            else:
                deltas.append(_symbol(value - anchor_value, channel.delta_step))
        runs += _channel_runs(channel, anchors, deltas)
    return encode_symbols(runs, num_lanes)


def decode_cachegen_block(
    data: bytes, channels: list[OracleChannel], num_tokens: int, num_lanes: int
) -> F32:
    """Undo `encode_cachegen_block`; returns float32 [token, dim]."""
    num_anchors = -(-num_tokens // 10)
    blank = ([0] * num_anchors, [0] * (num_tokens - num_anchors))
    runs = [run for channel in channels for run in _channel_runs(channel, *blank)]
    decoded = decode_symbols(data, runs, num_lanes)
    out = np.empty((num_tokens, len(channels)), np.float32)
    for dim, channel in enumerate(channels):
        anchors, deltas = decoded[2 * dim], iter(decoded[2 * dim + 1])
        for token in range(num_tokens):
            anchor = np.float32(anchors[token // 10]) * channel.anchor_step
            if token % 10 == 0:
                out[token, dim] = anchor
            else:
                out[token, dim] = anchor + np.float32(next(deltas)) * channel.delta_step
    return out


def _symbol(value: np.float32, step: np.float32) -> int:
    scaled = np.clip(value * (np.float32(1) / step), np.float32(-32767), np.float32(32767))
    return int(np.rint(scaled))


def _channel_runs(
    channel: OracleChannel, anchors: list[int], deltas: list[int]
) -> tuple[OracleRun, OracleRun]:
    return (
        OracleRun(
            channel.anchor_frequencies,
            channel.anchor_low + channel.anchor_shift,
            channel.anchor_shift,
            anchors,
        ),
        OracleRun(channel.delta_frequencies, channel.delta_low, 0, deltas),
    )
