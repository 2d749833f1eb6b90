"""Level set `klt`, ours: keys before rotation, weighted by what the model is sensitive to, transformed over
groups of layers, one uniform step per token and group.

Layer 0 is not coded: it follows from the token ids, and both sides pass it in. The first token of a context
is an attention sink, whose errors cost most: it is coded beside the rest, in 8 bits per number. Choices and
what decided them: docs/adr/0020 to 0024. Format: docs/bitstream.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec import native, reference
from codec.bitstream import Bitstream
from codec.errors import CorruptBitstream, ShapeMismatch
from codec.geometry import FloatArray, Geometry, Rotary
from codec.klt_blocks import BLOCK_TOKENS, KltBlocks, KltSymbols
from codec.klt_loud import LoudTokens, pack_loud, parse_loud
from codec.klt_plan import LOUD_CLASS, NEUTRAL_CLASS, Group, KltPlan
from codec.klt_rows import Position, RowPasses
from codec.levels import LevelSet
from codec.profile import Profile
from codec.transform import EncodedBlocks, LayerZero

__all__ = [
    "BLOCK_TOKENS",
    "SINK_TOKENS",
    "KltRequest",
    "KltTransform",
    "token_classes",
    "token_features",
]

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
class KltRequest:
    """What to encode a chunk at."""

    index: int
    """The level, or what a refinement ends at."""

    base_index: int | None = None
    """Of a refinement: the level that it starts from."""


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
        self.blocks = KltBlocks(self.plan, num_threads=num_threads)
        self.rows = RowPasses(self.geometry, self.plan, rotary=rotary, num_threads=num_threads)

    @staticmethod
    def max_payload_bytes(geometry: Geometry, num_tokens: int) -> int:
        """Return a bound on the payload of any chunk of that many tokens, whatever the profile."""
        spans = -(-num_tokens // BLOCK_TOKENS)
        symbols = num_tokens * geometry.elements_per_token + num_tokens * geometry.num_layers
        return (
            _sink_bytes(geometry) + 8 * symbols + spans * geometry.num_layers * (4 * 32) + spans * 8
        )

    # ---- encode -----------------------------------------------------------------------------------------

    def encode(
        self, kv: FloatArray, *, level_index: int, token_start: int, layer0: LayerZero
    ) -> EncodedBlocks:
        """Encode a checked chunk, kv [layer, 2, token, head, dim]."""
        requests = [KltRequest(level_index)]
        return self.encode_many(kv, requests, token_start=token_start, layer0=layer0)[0]

    def encode_many(
        self,
        kv: FloatArray,
        requests: Sequence[KltRequest],
        *,
        token_start: int,
        layer0: LayerZero,
    ) -> list[EncodedBlocks]:
        """Encode a checked chunk at several levels and refinements, which share the transform.

        Args:
            kv: [layer, 2, token, head, dim].
            requests: of levels that there are, and of refinements whose base is refined by their level.
            token_start: position of the first token.
            layer0: float32 [2, token, head, dim].
        """
        num_tokens = kv.shape[2]
        bases = {r.base_index for r in requests if r.base_index is not None}
        levels = {i: self.plan.levels[i] for i in {r.index for r in requests} | bases}
        symbols = {
            i: np.zeros((level.num_components, num_tokens), np.int16) for i, level in levels.items()
        }
        classes = np.full((len(self.plan.groups), num_tokens), NEUTRAL_CLASS, np.uint8)
        loud: list[LoudTokens] = []
        position = self.rows.position(kv, token_start, layer0)
        for index, group in enumerate(self.plan.groups):
            rows = self.rows.gather(kv, group, position)
            classes[index] = token_classes(token_features(rows, self.rows.pieces(group)), group)
            beside = np.zeros(
                num_tokens, np.bool_
            )  # what is coded there costs next to nothing here
            if token_start == 0:
                beside[:SINK_TOKENS] = True
                classes[index, :SINK_TOKENS] = NEUTRAL_CLASS
            is_loud = classes[index] >= LOUD_CLASS
            classes[index, is_loud] = NEUTRAL_CLASS
            loud.append(LoudTokens(np.flatnonzero(is_loud), self.rows.plain(rows[is_loud], group)))
            most = max(int(level.groups[index]["num_components"]) for level in levels.values())
            coefficients = self._coefficients(rows, group, most, position)
            coefficients[:, beside | is_loud] = 0
            for i, level in levels.items():
                self._quantize(i, level.groups[index], coefficients, classes[index], symbols[i])
        sink = _encode_sink(kv[1:, :, :SINK_TOKENS]) if token_start == 0 else b""
        made = []
        for request in requests:
            level = levels[request.index]
            head = b"".join(pack_loud(found, level.loud_bits) for found in loud)
            if request.base_index is None:
                payload = self.blocks.encode(level, symbols[request.index], classes)
                made.append(_joined(sink + head, *payload))
                continue
            base = symbols[request.base_index]
            payload = self.blocks.encode_refinement(
                request.index, request.base_index, symbols[request.index], base, classes
            )
            check = KltSymbols(base.astype(np.int32), self._coded(request.base_index, classes))
            if levels[request.base_index].loud_bits == level.loud_bits:
                head = b""
            made.append(_joined(check.checksum.to_bytes(4, "little") + head, *payload))
        return made

    def _coded(self, index: int, classes: U8) -> U8:
        """Return classes as a decoder of that level knows them: none of groups without components."""
        has = self.plan.levels[index].groups["num_components"] > 0
        return np.where(has[:, None], classes, np.uint8(0))

    def _coefficients(self, rows: F32, group: Group, count: int, position: Position) -> F32:
        """Return float32 [component, token]."""
        if group.predictor is not None:
            rows = rows - position.layer0_rows @ group.predictor
        return np.ascontiguousarray(group.analysis[:count] @ rows.T)

    def _quantize(
        self,
        index: int,
        row: np.void,
        coefficients: F32,
        classes: U8,
        symbols: npt.NDArray[np.int16],
    ) -> None:
        first, count = int(row["first_component"]), int(row["num_components"])
        step, thirds = self.plan.quantizer(index)
        native.call(
            "kv_klt_quantize",
            coefficients,
            np.ascontiguousarray(classes),
            count,
            coefficients.shape[1],
            np.asarray([step]),
            thirds,
            symbols[first : first + count],
            self.num_threads,
        )

    # ---- decode -----------------------------------------------------------------------------------------

    def decode(
        self,
        stream: Bitstream,
        *,
        out: FloatArray,
        layer0: LayerZero,
        refinements: Sequence[Bitstream] = (),
    ) -> None:
        """Decode into `out`, [layer, 2, token, head, dim].

        Raises:
            CorruptBitstream: the blocks are not what an encoder writes, or a refinement is of something else.
            ShapeMismatch: there is no layer 0, or the rotary tables are too short.
        """
        if layer0 is None:
            raise ShapeMismatch("level set klt needs layer0, the KV of layer 0, to decode")
        sink, loud = self.beside(stream)
        last = stream
        if refinements:
            symbols = self.blocks.symbols(stream)
            for last in refinements:
                loud = self._refined_loud(last, loud, symbols)
                symbols = self.blocks.refined(symbols, last)
            coefficients = self.blocks.dequantized(last.level_index, symbols)
        else:
            coefficients = self.blocks.coefficients(stream)
        level = self.plan.levels[last.level_index]
        position = self.rows.position(out, stream.token_start, layer0)
        for index, group in enumerate(self.plan.groups):
            first = int(level.groups[index]["first_component"])
            count = int(level.groups[index]["num_components"])
            part = coefficients[first : first + count]
            rows = np.matmul(part.T, group.basis[:count])
            if group.predictor is not None:
                rows += position.layer0_rows @ group.predictor
            rows[loud[index].tokens] = self.rows.weighted(loud[index].values, group)
            self.rows.scatter(out, rows, group.first_layer, group.num_layers, position)
        self.rows.scatter(out, position.layer0_rows.copy(), 0, 1, position)
        if sink is not None:
            out[1:, :, :SINK_TOKENS] = reference.to_half(sink) if out.dtype == np.float16 else sink

    def beside(self, stream: Bitstream) -> tuple[F32 | None, list[LoudTokens]]:
        """Return what a level codes beside the transform: the sink, and each group's loud tokens.

        Raises:
            CorruptBitstream: the first block is not what an encoder writes.
        """
        self.blocks.check(stream)
        data = _first_block(stream)
        sink = None
        if stream.token_start == 0:
            sink = _decode_sink(data, self.geometry)
            data = data[_sink_bytes(self.geometry) :]
        return sink, self._loud(stream, data)

    def _refined_loud(
        self, stream: Bitstream, loud: list[LoudTokens], base: KltSymbols
    ) -> list[LoudTokens]:
        """Check that a refinement is of `base`, and return the loud tokens with its bits."""
        assert stream.base_index is not None
        self.blocks.check(stream)
        data = _first_block(stream)
        if len(data) < 4 or int.from_bytes(data[:4], "little") != base.checksum:
            raise CorruptBitstream(f"refinement {stream.level} is not of this chunk's symbols")
        levels = self.plan.levels
        if levels[stream.base_index].loud_bits == levels[stream.level_index].loud_bits:
            if len(data) > 4:
                raise CorruptBitstream(f"{len(data) - 4} bytes are left in the first block")
            return loud
        finer = self._loud(stream, data[4:])
        for old, new in zip(loud, finer, strict=True):
            if not np.array_equal(old.tokens, new.tokens):
                raise CorruptBitstream(f"refinement {stream.level} has other loud tokens")
        return finer

    def _loud(self, stream: Bitstream, data: memoryview) -> list[LoudTokens]:
        bits = self.plan.levels[stream.level_index].loud_bits
        loud = []
        for group in self.plan.groups:
            pieces = self.rows.pieces(group)
            found, used = parse_loud(data, stream.num_tokens, pieces, self.geometry.head_dim, bits)
            loud.append(found)
            data = data[used:]
        if len(data):
            raise CorruptBitstream(f"{len(data)} bytes are left in the first block")
        return loud


def _joined(beside: bytes, payload: U8, offsets: npt.NDArray[np.uint32]) -> EncodedBlocks:
    """Put the first block in front of the groups' blocks."""
    return EncodedBlocks(
        BLOCK_TOKENS,
        np.concatenate(([0], offsets.astype(np.int64) + len(beside))).astype(np.uint32),
        np.concatenate((np.frombuffer(beside, np.uint8), payload)),
    )


def _first_block(stream: Bitstream) -> memoryview:
    return memoryview(stream.payload[: int(stream.offsets[1])].tobytes())


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
