"""The store's SQLite index: its schema, its opening, its errors, and the lock on the folder.

Invariants: an index of another version is refused, never guessed at; every SQLite error comes out as
``StoreFull`` or ``StoreIOError``. Must not know: contexts' meaning, chunk files.
"""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from edge_agent.chunk_files import map_disk_errors
from edge_agent.errors import StoreFull, StoreIOError, StoreLocked, StoreVersionError

SCHEMA_VERSION = 1
"""Version of the index; another one is refused, never guessed at."""

_SCHEMA = """
CREATE TABLE chunks (
  key BLOB NOT NULL, level TEXT NOT NULL, num_bytes INTEGER NOT NULL, digest BLOB NOT NULL,
  PRIMARY KEY (key, level)
) WITHOUT ROWID;
CREATE TABLE contexts (
  context_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, model_digest BLOB NOT NULL,
  profile_digest BLOB NOT NULL, text_digest BLOB NOT NULL, text_chars INTEGER NOT NULL,
  token_ids BLOB NOT NULL, created_at REAL NOT NULL, last_use INTEGER NOT NULL
);
CREATE TABLE context_chunks (
  context_id TEXT NOT NULL REFERENCES contexts ON DELETE CASCADE, position INTEGER NOT NULL,
  token_start INTEGER NOT NULL, token_stop INTEGER NOT NULL, key BLOB NOT NULL,
  PRIMARY KEY (context_id, position)
) WITHOUT ROWID;
CREATE INDEX context_chunks_by_key ON context_chunks (key);
CREATE INDEX contexts_by_text ON contexts (text_chars, text_digest);
"""


def lock_folder(root: Path) -> IO[bytes]:
    """Take the store for this process; closing the returned file gives it back.

    Raises:
        StoreLocked: another process has it.
    """
    with map_disk_errors(f"open {root}"):
        lock_file = (root / "lock").open("wb")
    try:
        # The kernel drops this lock when the process ends, however it ends.
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock_file.close()
        raise StoreLocked(f"the context store {root} is open in another process") from error
    return lock_file


def open_index(path: Path) -> sqlite3.Connection:
    """Open the index, or create it.

    Raises:
        StoreVersionError: it has another schema version.
        StoreIOError: it is not a database, or cannot be read.
    """
    with map_sqlite_errors():
        db = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            has_tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
            if version != SCHEMA_VERSION and (version or has_tables):
                raise StoreVersionError(
                    f"the context store {path.parent} has schema version {version}, this program"
                    f" reads version {SCHEMA_VERSION}: move the folder away or run the matching release"
                )
            db.execute("PRAGMA journal_mode = WAL")
            # FULL: a context that was reported as stored survives a power cut.
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA foreign_keys = ON")
            if not has_tables:
                # One script, one transaction: a kill in the middle leaves an empty file.
                db.executescript(
                    f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
        except BaseException:
            db.close()
            raise
    return db


@contextlib.contextmanager
def map_sqlite_errors() -> Iterator[None]:
    """Turn SQLite's errors into the store's."""
    try:
        yield
    except sqlite3.Error as error:
        # Errors of the Python module itself carry no code.
        code = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF == sqlite3.SQLITE_FULL:
            raise StoreFull("the context store's index has no room: the disk is full") from error
        raise StoreIOError(f"the context store's index failed: {error}") from error
