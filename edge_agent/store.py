"""The context store: which contexts exist, which chunks they have, what goes when room is short.

Chunk files (``chunk_files.py``) hold the bitstreams, an SQLite index says what they are. Invariants:
a chunk is visible only after its file is complete and flushed; a context is visible only after all
of its chunks are; a chunk that is pinned (being sent, or part of a running ingest) is never evicted.
After ``kill -9`` the next start removes what no context refers to. All methods are thread-safe and
block: call them from an executor. Must not know: HTTP, wire, engine.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from blake3 import blake3

from edge_agent.chunk_files import ChunkFiles, FileOps
from edge_agent.errors import (
    ContextConflict,
    CorruptChunk,
    StoreFull,
    StoreIOError,
    UnknownContext,
)
from edge_agent.keys import ChunkSpan, text_digest
from edge_agent.store_index import lock_folder, map_sqlite_errors, open_index
from edge_agent.store_records import (
    ContextInfo,
    StoredContext,
    StoreUsage,
    is_prefix_text,
    is_same_content,
)

__all__ = [
    "ContextInfo",
    "ContextStore",
    "Ingest",
    "StoreUsage",
    "StoredContext",
    "is_prefix_text",
    "is_same_content",
]


class ContextStore:
    """Contexts and chunks under one folder; open at most once at a time."""

    def __init__(
        self,
        root: Path,
        *,
        quota_bytes: int,
        ops: FileOps | None = None,
        wall_clock: Callable[[], float] = time.time,
        on_evict: Callable[[str], None] | None = None,
    ) -> None:
        """Open or create a store, and repair what a crash left.

        Args:
            root: folder of the store; created where missing.
            quota_bytes: most bytes of chunk files.
            ops: file operations; tests pass ones that fail.
            wall_clock: seconds since 1970, only recorded, never compared.
            on_evict: told the id of each evicted context, from the thread that needed the room.

        Raises:
            StoreLocked: another process has it open.
            StoreVersionError: written by another version.
            StoreIOError: the folder or the index cannot be read or written.
        """
        self._root = root.expanduser()
        self._quota_bytes = quota_bytes
        self._wall_clock = wall_clock
        self._on_evict = on_evict
        self._lock = threading.RLock()
        # Held across a whole file write, so that two ingests never race for one (key, level).
        self._write_lock = threading.Lock()
        self._pinned_keys: Counter[bytes] = Counter()
        self._pinned_contexts: Counter[str] = Counter()
        self._doomed: list[tuple[bytes, str]] = []
        self._num_evicted = 0
        self._num_corrupt = 0
        self._files = ChunkFiles(self._root, ops or FileOps())
        self._lock_file = lock_folder(self._root)
        try:
            self._db = open_index(self._root / "index.sqlite3")
            with map_sqlite_errors():
                self.num_repaired = self._repair()
                self._num_bytes = self._count_bytes()
                row = self._db.execute("SELECT coalesce(max(last_use), 0) FROM contexts").fetchone()
                self._use_counter: int = row[0]
        except BaseException:
            self._lock_file.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._lock_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading

    @property
    def root(self) -> Path:
        """Folder of the store."""
        return self._root

    def usage(self) -> StoreUsage:
        with self._reading():
            row = self._db.execute("SELECT count(*) FROM contexts").fetchone()
            return StoreUsage(self._num_bytes, row[0], self._num_evicted, self._num_corrupt)

    def list_contexts(self) -> list[ContextInfo]:
        """Return all contexts, most recently used first."""
        with self._reading():
            rows = self._db.execute("SELECT context_id FROM contexts ORDER BY last_use DESC")
            return [self._describe(context_id) for (context_id,) in rows.fetchall()]

    def describe(self, context_id: str) -> ContextInfo:
        """Return one context as a listing shows it.

        Raises:
            UnknownContext: there is none with this id.
        """
        with self._reading():
            return self._describe(context_id)

    def get(self, context_id: str) -> StoredContext:
        """Return a context.

        Raises:
            UnknownContext: there is none with this id.
        """
        with self._reading():
            return self._load(context_id)

    def find_by_text(self, text: str, *, tenant: str, model_digest: bytes) -> StoredContext | None:
        """Return the context whose whole text is the longest prefix of ``text``, if any."""
        with self._reading():
            lengths = self._db.execute(
                "SELECT DISTINCT text_chars FROM contexts WHERE text_chars BETWEEN 1 AND ?"
                " AND tenant = ? AND model_digest = ? ORDER BY text_chars DESC",
                (len(text), tenant, model_digest),
            ).fetchall()
            for (num_chars,) in lengths:
                row = self._db.execute(
                    "SELECT context_id FROM contexts WHERE text_chars = ? AND text_digest = ?"
                    " AND tenant = ? AND model_digest = ? ORDER BY last_use DESC",
                    (num_chars, text_digest(text[:num_chars]), tenant, model_digest),
                ).fetchone()
                if row is not None:
                    return self._load(row[0])
        return None

    def chunk_sizes(self, context: StoredContext) -> list[dict[str, int]]:
        """Return per chunk the bytes of each level that is stored; a dropped level is absent."""
        with self._reading():
            return [self._sizes(span.key) for span in context.spans]

    def read_chunk(self, key: bytes, level: str) -> bytes:
        """Return one chunk's bitstream, verified against the digest in the index.

        Raises:
            CorruptChunk: missing, short or altered; the chunk is dropped from the store.
            StoreIOError: the disk failed; the chunk stays.
        """
        with self._reading():
            row = self._db.execute(
                "SELECT num_bytes, digest FROM chunks WHERE key = ? AND level = ?", (key, level)
            ).fetchone()
        if row is None:
            raise CorruptChunk(key=key, level=level, reason="it is not in the index")
        try:
            payload = self._files.read(key, level)
        except FileNotFoundError:
            payload, reason = b"", "its file is missing"
        else:
            if len(payload) == row[0] and blake3(payload).digest() == row[1]:
                return payload
            reason = f"its file has {len(payload)} bytes that are not the {row[0]} stored"
        with self._writing():
            self._num_corrupt += self._drop_chunk(key, level)
        raise CorruptChunk(key=key, level=level, reason=reason)

    @contextlib.contextmanager
    def use(self, context_id: str) -> Iterator[StoredContext]:
        """Hold a context so that nothing of it is evicted, and mark it as used.

        Raises:
            UnknownContext: there is none with this id.
        """
        keys: list[bytes] = []
        with self._reading():
            context = self._load(context_id)
            keys += [span.key for span in context.spans]
            self._pinned_contexts[context_id] += 1
            self._pinned_keys.update(keys)
        try:
            # A full disk must not stop questions about what is stored: only the order of use is lost.
            with contextlib.suppress(StoreFull, StoreIOError), self._writing():
                self._use_counter += 1
                self._db.execute(
                    "UPDATE contexts SET last_use = ? WHERE context_id = ?",
                    (self._use_counter, context_id),
                )
            yield context
        finally:
            with self._writing():
                self._pinned_contexts -= Counter({context_id: 1})
                self._unpin(keys)

    # Writing

    def delete(self, context_id: str) -> None:
        """Remove a context; chunks that others use, or that are being sent, stay until then.

        Raises:
            UnknownContext: there is none with this id.
        """
        with self._writing():
            self._delete(self._load(context_id))

    def check_free(self, context: StoredContext) -> None:
        """Tell before the work starts that an id is taken.

        Raises:
            ContextConflict: the id is taken by another text or model.
        """
        with self._reading(), contextlib.suppress(UnknownContext):
            if not is_same_content(self._load(context.context_id), context):
                raise ContextConflict(context.context_id)

    def begin_ingest(self) -> Ingest:
        """Start to store a context; close the result in any case."""
        return Ingest(self)

    def _put(self, key: bytes, level: str, payload: bytes) -> bool:
        """Store one chunk file; return False where it was there already."""
        with self._write_lock:
            with self._writing():
                if level in self._sizes(key):
                    return False
                self._make_room(len(payload))
            self._files.write(key, level, payload)
            try:
                with self._writing():
                    self._db.execute(
                        "INSERT INTO chunks VALUES (?, ?, ?, ?)",
                        (key, level, len(payload), blake3(payload).digest()),
                    )
                    self._num_bytes += len(payload)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._files.remove(key, level)
                raise
            return True

    def _commit(self, context: StoredContext) -> None:
        with self._writing():
            try:
                present = self._load(context.context_id)
            except UnknownContext:
                pass
            else:
                if not is_same_content(present, context):
                    raise ContextConflict(context.context_id)
                # Chunk keys depend on the profile set; the newer set replaces the older one.
                self._db.execute("DELETE FROM contexts WHERE context_id = ?", (context.context_id,))
            self._use_counter += 1
            self._db.execute(
                "INSERT INTO contexts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    context.context_id,
                    context.tenant,
                    context.model_digest,
                    context.profile_digest,
                    context.text_digest,
                    context.text_chars,
                    zlib.compress(np.asarray(context.token_ids, dtype="<u4").tobytes(), 1),
                    self._wall_clock(),
                    self._use_counter,
                ),
            )
            self._db.executemany(
                "INSERT INTO context_chunks VALUES (?, ?, ?, ?, ?)",
                [
                    (context.context_id, position, span.token_start, span.token_stop, span.key)
                    for position, span in enumerate(context.spans)
                ],
            )

    def _make_room(self, num_bytes: int) -> None:
        while self._num_bytes + num_bytes > self._quota_bytes:
            rows = self._db.execute("SELECT context_id FROM contexts ORDER BY last_use").fetchall()
            victim = next((cid for (cid,) in rows if not self._pinned_contexts[cid]), None)
            if victim is None:
                raise StoreFull(
                    f"the context store's quota of {self._quota_bytes} bytes has no room for"
                    f" {num_bytes} more: {self._num_bytes} are in use by running work"
                )
            self._delete(self._load(victim))
            self._num_evicted += 1
            if self._on_evict is not None:
                self._on_evict(victim)

    def _delete(self, context: StoredContext) -> None:
        self._db.execute("DELETE FROM contexts WHERE context_id = ?", (context.context_id,))
        self._collect(span.key for span in context.spans)

    def _unpin(self, keys: Sequence[bytes]) -> None:
        self._pinned_keys -= Counter(keys)
        self._collect(keys)

    def _collect(self, keys: Iterable[bytes]) -> None:
        """Remove chunks that no context refers to and nobody holds."""
        for key in set(keys):
            if self._pinned_keys[key]:
                continue
            used = self._db.execute(
                "SELECT 1 FROM context_chunks WHERE key = ? LIMIT 1", (key,)
            ).fetchone()
            if used is None:
                for level in self._sizes(key):
                    self._drop_chunk(key, level)

    def _drop_chunk(self, key: bytes, level: str) -> int:
        rows = self._db.execute(
            "DELETE FROM chunks WHERE key = ? AND level = ? RETURNING num_bytes", (key, level)
        ).fetchall()
        for (num_bytes,) in rows:
            self._num_bytes -= num_bytes
            self._doomed.append((key, level))
        return len(rows)

    def _count_bytes(self) -> int:
        row = self._db.execute("SELECT coalesce(sum(num_bytes), 0) FROM chunks").fetchone()
        return int(row[0])

    def _sizes(self, key: bytes) -> dict[str, int]:
        return dict(
            self._db.execute("SELECT level, num_bytes FROM chunks WHERE key = ?", (key,)).fetchall()
        )

    def _describe(self, context_id: str) -> ContextInfo:
        row = self._db.execute(
            "SELECT model_digest, created_at, count(key), coalesce(max(token_stop), 0)"
            " FROM contexts LEFT JOIN context_chunks USING (context_id)"
            " WHERE context_id = ? GROUP BY context_id",
            (context_id,),
        ).fetchone()
        if row is None:
            raise UnknownContext(context_id)
        levels = self._db.execute(
            "SELECT level, sum(num_bytes) FROM context_chunks JOIN chunks USING (key)"
            " WHERE context_id = ? GROUP BY level ORDER BY level",
            (context_id,),
        ).fetchall()
        return ContextInfo(
            context_id=context_id,
            model_digest=row[0],
            num_tokens=row[3],
            num_chunks=row[2],
            bytes_by_level=dict(levels),
            created_at=row[1],
        )

    def _load(self, context_id: str) -> StoredContext:
        row = self._db.execute(
            "SELECT tenant, model_digest, profile_digest, text_digest, text_chars, token_ids,"
            " created_at FROM contexts WHERE context_id = ?",
            (context_id,),
        ).fetchone()
        if row is None:
            raise UnknownContext(context_id)
        spans = self._db.execute(
            "SELECT token_start, token_stop, key FROM context_chunks WHERE context_id = ?"
            " ORDER BY position",
            (context_id,),
        ).fetchall()
        return StoredContext(
            context_id=context_id,
            tenant=row[0],
            model_digest=row[1],
            profile_digest=row[2],
            text_digest=row[3],
            text_chars=row[4],
            token_ids=tuple(np.frombuffer(zlib.decompress(row[5]), dtype="<u4").tolist()),
            spans=tuple(ChunkSpan(*span) for span in spans),
            created_at=row[6],
        )

    def _repair(self) -> int:
        """Bring index and files into agreement after a crash; return how many items went."""
        on_disk = {(key, level): size for key, level, size in self._files.scan()}
        dropped = 0
        with self._db:
            for key, level, num_bytes in self._db.execute(
                "SELECT key, level, num_bytes FROM chunks"
            ).fetchall():
                used = self._db.execute(
                    "SELECT 1 FROM context_chunks WHERE key = ? LIMIT 1", (key,)
                ).fetchone()
                if used is None or on_disk.get((key, level)) != num_bytes:
                    self._db.execute("DELETE FROM chunks WHERE key = ? AND level = ?", (key, level))
                    dropped += 1
        rows = self._db.execute("SELECT key, level FROM chunks").fetchall()
        return dropped + self._files.remove_strays({(key, level) for key, level in rows})

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, map_sqlite_errors():
            yield

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock, map_sqlite_errors():
            try:
                # One transaction; sqlite3's own context manager commits it or rolls it back.
                with self._db:
                    yield
            except BaseException:
                self._doomed.clear()
                self._num_bytes = self._count_bytes()
                raise
            # Files go after the rows are gone for good: a kill in between leaves files without a
            # row, which the next start removes, never a row that promises a missing file.
            doomed, self._doomed = self._doomed, []
            for key, level in doomed:
                with contextlib.suppress(StoreIOError):
                    self._files.remove(key, level)


class Ingest:
    """One context on its way into the store; invisible until ``commit``."""

    def __init__(self, store: ContextStore) -> None:
        self._store = store
        self._keys: list[bytes] = []

    def missing_levels(self, key: bytes, levels: Sequence[str]) -> list[str]:
        """Hold a chunk and return which of these levels are not stored yet."""
        with self._store._reading():
            self._store._pinned_keys[key] += 1
            self._keys.append(key)
            present = self._store._sizes(key)
        return [level for level in levels if level not in present]

    def put(self, key: bytes, level: str, payload: bytes) -> None:
        """Store one encoded chunk, evicting the least recently used contexts where needed.

        Raises:
            StoreFull: quota or disk have no room.
            StoreIOError: the disk failed.
        """
        self._store._put(key, level, payload)

    def commit(self, context: StoredContext) -> None:
        """Make the context visible, durably, in one step.

        Raises:
            ContextConflict: the id is taken by another text or model.
        """
        self._store._commit(context)

    def close(self) -> None:
        """Let go; chunks of an ingest that was not committed are removed."""
        keys, self._keys = self._keys, []
        with self._store._writing():
            self._store._unpin(keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
