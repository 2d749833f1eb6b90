"""Level set `klt`, ours: keys before rotation, weighted by what the model is sensitive to, transformed over
groups of layers, one uniform step per token and group.

Layer 0 is not coded: it follows from the token ids, and both sides pass it in. The first token of a context
is an attention sink, whose errors cost most: it is coded beside the rest, in 8 bits per number. Choices and
what decided them: docs/adr/0020 to 0024. Format: docs/bitstream.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec import native, reference
from codec.bitstream import Bitstream
from codec.entropy import gather_blocks
from codec.errors import CorruptBitstream, ShapeMismatch
from codec.geometry import FloatArray, Geometry, Rotary
from codec.klt_loud import LoudTokens, pack_loud, parse_loud
from codec.klt_native import KltChunk, KltRows
from codec.klt_plan import LOUD_CLASS, NEUTRAL_CLASS, Group, KltPlan, LevelPlan
from codec.levels import LevelSet
from codec.profile import Profile
from codec.transform import EncodedBlocks, LayerZero

__all__ = [
    "BLOCK_TOKENS",
    "SINK_TOKENS",
    "KltTransform",
    "token_classes",
    "token_features",
]

BLOCK_TOKENS = 128
"""Tokens per block: four tiles of a warp. A block's lanes cost 64 bytes, 0.4 % of a block at 0.5 bits."""

SINK_TOKENS = 1
"""Tokens at the start of a context that are coded beside the transform."""

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def token_features(rows: F32, num_heads: int) -> F32:
    """Return what tells how sensitive a token is: the energy of each layer's, side's and head's numbers.

    Args:
        rows: float32 [token, row]: weighted values without their mean.
        num_heads: pieces of a row: 2 * layers * KV heads.

    Returns:
        float32 [token, feature + 1]: log2 of mean squares, and a constant 1.
    """
    energy = np.square(rows).reshape(len(rows), num_heads, -1).mean(axis=2)
    constant = np.ones((len(rows), 1), np.float32)
    return np.concatenate((np.log2(energy + np.float32(1e-12)), constant), axis=1)


def token_classes(features: F32, group: Group) -> U8:
    """Return uint8 [token]: class of the step, which is divided by 2^(class - NEUTRAL_CLASS); LOUD_CLASS at most."""
    loudness = features @ group.sensitivity
    return np.asarray(np.searchsorted(group.loudness_edges, loudness, side="right"), np.uint8)


@dataclass(frozen=True, slots=True)
class _Position:
    """Where a chunk lies, with the rotary tables of its tokens and the kernels' constants."""

    rows: KltRows
    layer0_rows: F32
    """float32 [token, 2 * channel], weighted."""


class KltTransform:
    """`klt` for one geometry and profile."""

    level_set = LevelSet.KLT

    def __init__(self, profile: Profile, *, num_threads: int, rotary: Rotary | None) -> None:
        """Check the profile.

        Raises:
            CorruptBitstream: its arrays make no transform.
        """
        self.geometry = profile.geometry
        self.num_threads = num_threads
        self.rotary = rotary
        self.plan = KltPlan.from_profile(profile)
        self._inverse_weight = np.asarray(1 / self.plan.weight, np.float32)

    @staticmethod
    def max_payload_bytes(geometry: Geometry, num_tokens: int) -> int:
        """Return a bound on the payload of any chunk of that many tokens, whatever the profile."""
        spans = -(-num_tokens // BLOCK_TOKENS)
        symbols = num_tokens * geometry.elements_per_token + num_tokens * geometry.num_layers
        return (
            _sink_bytes(geometry) + 8 * symbols + spans * geometry.num_layers * (4 * 32) + spans * 8
        )

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks of a chunk: the sink's, then one per group and span."""
        return 1 + len(self.plan.groups) * -(-num_tokens // BLOCK_TOKENS)

    # ---- encode -----------------------------------------------------------------------------------------

    def encode(
        self, kv: FloatArray, *, level_index: int, token_start: int, layer0: LayerZero
    ) -> EncodedBlocks:
        """Encode a checked chunk, kv [layer, 2, token, head, dim]."""
        level = self.plan.levels[level_index]
        num_tokens = kv.shape[2]
        position = self._position(kv, token_start, layer0)
        # RoPE does not turn position 0, so the sink's cached keys are its keys.
        beside = _encode_sink(kv[1:, :, :SINK_TOKENS]) if token_start == 0 else b""
        symbols = np.zeros((level.num_components, num_tokens), np.int16)
        classes = np.full((len(self.plan.groups), num_tokens), NEUTRAL_CLASS, np.uint8)
        for index, group in enumerate(self.plan.groups):
            first = int(level.groups[index]["first_component"])
            count = int(level.groups[index]["num_components"])
            rows = self._gather(kv, group.first_layer, group.num_layers, position)
            classes[index] = token_classes(token_features(rows, self._pieces(group)), group)
            if token_start == 0:
                classes[index, :SINK_TOKENS] = NEUTRAL_CLASS
            loud = np.flatnonzero(classes[index] >= LOUD_CLASS)
            beside += pack_loud(LoudTokens(loud, self._plain(rows[loud], group)), level.loud_bits)
            coefficients = self._coefficients(rows, group, count, position)
            if token_start == 0:  # what is coded beside the transform costs next to nothing here
                coefficients[:, :SINK_TOKENS] = 0
            coefficients[:, loud] = 0
            classes[index, loud] = NEUTRAL_CLASS
            native.call(
                "kv_klt_quantize",
                coefficients,
                np.ascontiguousarray(classes[index]),
                count,
                num_tokens,
                np.asarray([level.step]),
                symbols[first : first + count],
                self.num_threads,
            )
        return self.encode_symbols(level, symbols, classes, beside)

    def encode_symbols(
        self,
        level: LevelPlan,
        symbols: npt.NDArray[np.int16],
        classes: U8,
        beside: bytes,
    ) -> EncodedBlocks:
        """Entropy-encode int16 symbols [component, token] and classes [group, token].

        Args:
            level: whose tables are used.
            symbols: int16 [component, token].
            classes: uint8 [group, token], below LOUD_CLASS.
            beside: the first block.
        """
        num_tokens = symbols.shape[1]
        groups = level.placed(num_tokens)
        most = int(groups["num_components"].max())
        tokens = min(BLOCK_TOKENS, num_tokens)
        space = 4 * 32 + 4 * tokens * (most + 1)
        num_blocks = self.num_blocks(num_tokens) - 1
        output = np.empty(num_blocks * space, np.uint8)  # mostly untouched pages
        sizes = np.zeros(num_blocks, np.uint32)
        native.call(
            "kv_klt_encode",
            self._chunk(groups, level, num_tokens),
            native.Tables.of(self.plan.tables, decode=False),
            symbols,
            classes,
            output,
            space,
            sizes,
        )
        ends = np.arange(1, num_blocks + 1, dtype=np.int64) * space
        payload, offsets = gather_blocks(output, ends, sizes)
        return EncodedBlocks(
            BLOCK_TOKENS,
            np.concatenate(([0], offsets.astype(np.int64) + len(beside))).astype(np.uint32),
            np.concatenate((np.frombuffer(beside, np.uint8), payload)),
        )

    def _coefficients(self, rows: F32, group: Group, count: int, position: _Position) -> F32:
        """Return float32 [component, token]."""
        if group.predictor is not None:
            rows = rows - position.layer0_rows @ group.predictor
        return np.ascontiguousarray(group.analysis[:count] @ rows.T)

    def _pieces(self, group: Group) -> int:
        return 2 * group.num_layers * self.geometry.num_kv_heads

    def _plain(self, rows: F32, group: Group) -> F32:
        """Return [token, piece, dim] without weight and with the mean."""
        layers = slice(group.first_layer, group.first_layer + group.num_layers)
        plain = rows * self._inverse_weight[layers].ravel() + self.plan.mean[layers].ravel()
        return np.asarray(
            plain.reshape(len(rows), self._pieces(group), self.geometry.head_dim), np.float32
        )

    def weighted(self, plain: F32, group: Group) -> F32:
        """Undo `_plain`; returns float32 [token, row]."""
        layers = slice(group.first_layer, group.first_layer + group.num_layers)
        flat = plain.reshape(len(plain), group.num_rows) - self.plan.mean[layers].ravel()
        return np.asarray(flat * self.plan.weight[layers].ravel(), np.float32)

    # ---- decode -----------------------------------------------------------------------------------------

    def decode(self, stream: Bitstream, *, out: FloatArray, layer0: LayerZero) -> None:
        """Decode into `out`, [layer, 2, token, head, dim].

        Raises:
            CorruptBitstream: the blocks are not what an encoder writes.
            ShapeMismatch: there is no layer 0, or the rotary tables are too short.
        """
        if layer0 is None:
            raise ShapeMismatch("level set klt needs layer0, the KV of layer 0, to decode")
        level = self.plan.levels[stream.level_index]
        sink, loud = self.beside(stream)
        coefficients = self.decode_coefficients(stream)
        position = self._position(out, stream.token_start, layer0)
        for index, group in enumerate(self.plan.groups):
            first = int(level.groups[index]["first_component"])
            count = int(level.groups[index]["num_components"])
            part = coefficients[first : first + count]
            rows = np.matmul(part.T, group.basis[:count])
            if group.predictor is not None:
                rows += position.layer0_rows @ group.predictor
            rows[loud[index].tokens] = self.weighted(loud[index].values, group)
            self._scatter(out, rows, group.first_layer, group.num_layers, position)
        self._scatter(out, position.layer0_rows.copy(), 0, 1, position)
        if sink is not None:
            out[1:, :, :SINK_TOKENS] = reference.to_half(sink) if out.dtype == np.float16 else sink

    def beside(self, stream: Bitstream) -> tuple[F32 | None, list[LoudTokens]]:
        """Return what is coded beside the transform: the sink, and each group's loud tokens.

        Raises:
            CorruptBitstream: the first block is not what an encoder writes.
        """
        self.check_blocks(stream)
        data = memoryview(stream.payload[: int(stream.offsets[1])].tobytes())
        sink = None
        if stream.token_start == 0:
            sink = _decode_sink(data, self.geometry)
            data = data[_sink_bytes(self.geometry) :]
        bits = self.plan.levels[stream.level_index].loud_bits
        loud = []
        for group in self.plan.groups:
            found, used = parse_loud(
                data, stream.num_tokens, self._pieces(group), self.geometry.head_dim, bits
            )
            loud.append(found)
            data = data[used:]
        if len(data):
            raise CorruptBitstream(f"{len(data)} bytes are left in the first block")
        return sink, loud

    def decode_coefficients(self, stream: Bitstream) -> F32:
        """Return float32 [component, token]: all groups' coefficients.

        Raises:
            CorruptBitstream: the blocks are not what an encoder writes.
        """
        num_tokens = stream.num_tokens
        offsets = self.check_blocks(stream)
        level = self.plan.levels[stream.level_index]
        coefficients = np.empty((level.num_components, num_tokens), np.float32)
        status = np.zeros(len(offsets) - 1, np.int32)
        native.call(
            "kv_klt_decode",
            self._chunk(level.placed(num_tokens), level, num_tokens),
            native.Tables.of(self.plan.tables, decode=True),
            np.ascontiguousarray(stream.payload),
            offsets,
            np.asarray([level.step]),
            coefficients,
            status,
        )
        native.check_status(status)
        return coefficients

    def check_blocks(self, stream: Bitstream) -> npt.NDArray[np.uint32]:
        """Return the offsets of the groups' blocks, uint32 [block + 1].

        Raises:
            CorruptBitstream: blocks of another count or size than the profile makes.
        """
        num_tokens = stream.num_tokens
        if stream.block_tokens != BLOCK_TOKENS:
            raise CorruptBitstream(
                f"blocks of {stream.block_tokens} tokens; level set klt has {BLOCK_TOKENS}"
            )
        if len(stream.offsets) != self.num_blocks(num_tokens) + 1:
            raise CorruptBitstream(
                f"{len(stream.offsets) - 1} blocks where the profile makes {self.num_blocks(num_tokens)}"
            )
        if np.any(stream.offsets % 2):
            raise CorruptBitstream("a block starts between two words")
        return np.ascontiguousarray(stream.offsets[1:])

    # ---- rows -------------------------------------------------------------------------------------------

    def _chunk(self, groups: npt.NDArray[np.void], level: LevelPlan, num_tokens: int) -> KltChunk:
        return KltChunk.of(
            groups,
            level.components,
            num_tokens=num_tokens,
            block_tokens=BLOCK_TOKENS,
            num_threads=self.num_threads,
        )

    def _position(self, kv: FloatArray, token_start: int, layer0: LayerZero) -> _Position:
        """Return the kernels' constants for a chunk; kv gives tokens and dtype, and layer 0 if need be."""
        geometry = self.geometry
        num_tokens = kv.shape[2]
        if self.rotary is None:
            raise ShapeMismatch("level set klt needs the model's rotary tables")
        rotary = self.rotary
        num_tables, positions, half = rotary.cos.shape
        if token_start + num_tokens > positions:
            raise ShapeMismatch(
                f"rotary tables of {positions} positions; the chunk ends at {token_start + num_tokens}"
            )
        if 2 * half > geometry.head_dim or len(rotary.table_of_layer) != geometry.num_layers:
            raise ShapeMismatch("the rotary tables are not those of this geometry")
        span = slice(token_start, token_start + num_tokens)
        # Some models scale rotated keys; a table's first cosine is that scale. Here only the turn is undone.
        scale = rotary.cos[:, :1, :1]
        cosine = np.ascontiguousarray(rotary.cos[:, span] / scale, np.float32)
        sine = np.ascontiguousarray(rotary.sin[:, span] / scale, np.float32)
        table_of_layer = np.ascontiguousarray(rotary.table_of_layer, np.int32)
        if table_of_layer.min() < 0 or table_of_layer.max() >= num_tables:
            raise ShapeMismatch("a layer uses a rotary table that is not there")
        constants = (self.plan.mean, self.plan.weight, self._inverse_weight)
        numbers = {
            "num_tables": num_tables,
            "half": half,
            "interleaved": int(rotary.interleaved),
            "num_heads": geometry.num_kv_heads,
            "head_dim": geometry.head_dim,
            "num_tokens": num_tokens,
            "num_threads": self.num_threads,
        }
        rows = KltRows.of(
            (*constants, cosine, sine, table_of_layer),
            is_half=int(kv.dtype == np.float16),
            **numbers,
        )
        layer0_rows = np.empty((num_tokens, 2 * geometry.num_channels), np.float32)
        if layer0 is None:
            native.call("kv_klt_gather", rows, kv, 0, 1, 1, layer0_rows)
        else:
            shape = (2, num_tokens, geometry.num_kv_heads, geometry.head_dim)
            if layer0.shape != shape or layer0.dtype != np.float32:
                raise ShapeMismatch(f"layer0 is {layer0.dtype} {layer0.shape}, not float32 {shape}")
            if not np.isfinite(layer0).all():
                raise ShapeMismatch("layer0 holds numbers that are not finite")
            scaled = np.array(layer0, np.float32)
            scaled[0] *= np.float32(scale[table_of_layer[0], 0, 0])
            plain = KltRows.of((*constants, cosine, sine, table_of_layer), is_half=0, **numbers)
            native.call("kv_klt_gather", plain, scaled, 0, 1, 0, layer0_rows)
        return _Position(rows, layer0_rows)

    def _gather(
        self, kv: FloatArray, first_layer: int, num_layers: int, position: _Position
    ) -> F32:
        rows = np.empty((kv.shape[2], num_layers * 2 * self.geometry.num_channels), np.float32)
        native.call("kv_klt_gather", position.rows, kv, first_layer, num_layers, 1, rows)
        return rows

    def _scatter(
        self,
        out: FloatArray,
        rows: F32,
        first_layer: int,
        num_layers: int,
        position: _Position,
    ) -> None:
        native.call(
            "kv_klt_scatter",
            position.rows,
            np.ascontiguousarray(rows),
            first_layer,
            num_layers,
            out,
        )


def _sink_bytes(geometry: Geometry) -> int:
    rows = (geometry.num_layers - 1) * 2 * SINK_TOKENS * geometry.num_kv_heads
    return rows * (2 + geometry.head_dim)


def _encode_sink(values: FloatArray) -> bytes:
    """Return what int8 makes of [layer - 1, 2, token, head, dim]."""
    return reference.encode_int8_block(np.asarray(values, np.float32).reshape(-1, values.shape[-1]))


def _decode_sink(data: memoryview, geometry: Geometry) -> F32:
    shape = (geometry.num_layers - 1, 2, SINK_TOKENS, geometry.num_kv_heads, geometry.head_dim)
    num_rows = int(np.prod(shape[:-1]))
    own = data[: _sink_bytes(geometry)].tobytes()
    if len(own) < _sink_bytes(geometry):
        raise CorruptBitstream("the sink's block is cut")
    if int(np.frombuffer(own, "<u2", num_rows).max(initial=0)) > 0x7BFF:
        raise CorruptBitstream("the sink's block has a scale that no encoder writes")
    return reference.decode_int8_block(own, num_rows, geometry.head_dim).reshape(shape)
