"""Chunk files on disk: each is there whole, or not at all.

A file is written beside the store under a temporary name, flushed, renamed and its folder flushed,
so that neither ``kill -9`` nor a power cut leaves half of one under its final name. Disk errors
come out as ``StoreFull`` or ``StoreIOError``. Must not know: the index, contexts, quotas.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from edge_agent.errors import StoreError, StoreFull, StoreIOError

_LEVEL = re.compile(r"[A-Za-z0-9_.-]{1,32}(:[A-Za-z0-9_.-]{1,16})?")
_NAME = re.compile(r"([0-9a-f]{64})\.([A-Za-z0-9_.~-]{1,49})\.kvchunk")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FileOps:
    """The few operating-system calls that the store makes; tests replace them to fail on purpose."""

    def make_dir(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write_new(self, path: Path, data: bytes) -> None:
        """Create a file with this content and flush it to the disk."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def sync_dir(self, path: Path) -> None:
        """Flush a folder, so that a rename in it survives a power cut."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


class ChunkFiles:
    """The folder of chunk files, addressed by (key, level)."""

    def __init__(self, root: Path, ops: FileOps) -> None:
        self._root = root / "chunks"
        self._temp = root / "incoming"
        self._ops = ops
        self._serial = 0
        with map_disk_errors(f"prepare {root}"):
            ops.make_dir(self._root)
            ops.make_dir(self._temp)

    def path(self, key: bytes, level: str) -> Path:
        """Return where a chunk lives; the level is checked, because it becomes a file name."""
        if not _LEVEL.fullmatch(level):
            raise StoreError(f"level name {level!r} cannot be a file name")
        name = key.hex()
        return self._root / name[:2] / f"{name}.{level.replace(':', '~')}.kvchunk"

    def write(self, key: bytes, level: str, payload: bytes) -> None:
        """Store a chunk so that it is complete or absent, whatever happens.

        Raises:
            StoreFull: the disk has no room.
            StoreIOError: the disk failed.
        """
        target = self.path(key, level)
        self._serial += 1
        temp = self._temp / f"{os.getpid()}-{self._serial}"
        try:
            with map_disk_errors(f"write {target.name}"):
                self._ops.make_dir(target.parent)
                self._ops.write_new(temp, payload)
                self._ops.rename(temp, target)
                self._ops.sync_dir(target.parent)
                self._ops.sync_dir(self._root)
        except StoreError:
            # What stays behind if this fails too is unindexed, and removed at the next start.
            for leftover in (temp, target):
                with contextlib.suppress(OSError):
                    self._ops.remove(leftover)
            raise

    def read(self, key: bytes, level: str) -> bytes:
        """Return a chunk's bytes, unverified.

        Raises:
            FileNotFoundError: there is no such file.
            StoreIOError: the disk failed.
        """
        path = self.path(key, level)
        with map_disk_errors(f"read {path.name}"):
            return self._ops.read(path)

    def remove(self, key: bytes, level: str) -> None:
        with map_disk_errors("remove a chunk file"):
            self._ops.remove(self.path(key, level))

    def scan(self) -> Iterator[tuple[bytes, str, int]]:
        """Yield (key, level, bytes) of each file under a well-formed name."""
        for path in self._root.glob("*/*"):
            match = _NAME.fullmatch(path.name)
            if match and path.parent.name == path.name[:2]:
                yield bytes.fromhex(match[1]), match[2].replace("~", ":"), path.stat().st_size

    def remove_strays(self, indexed: set[tuple[bytes, str]]) -> int:
        """Delete every file that the index does not know, half-written ones included."""
        strays = list(self._temp.iterdir())
        known = {self.path(key, level) for key, level in indexed}
        strays += [path for path in self._root.glob("*/*") if path not in known]
        with map_disk_errors("remove left-over files"):
            for path in strays:
                self._ops.remove(path)
        return len(strays)


@contextlib.contextmanager
def map_disk_errors(doing: str) -> Iterator[None]:
    """Turn ``OSError`` into the store's errors; a missing file stays what it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_ROOM:
            raise StoreFull(f"the context store cannot {doing}: {reason}") from error
        raise StoreIOError(f"the context store cannot {doing}: {reason}") from error
