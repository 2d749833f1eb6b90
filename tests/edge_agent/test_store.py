from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_agent.chunk_files import FileOps
from edge_agent.errors import (
    ContextConflict,
    CorruptChunk,
    StoreError,
    StoreFull,
    StoreIOError,
    StoreLocked,
    StoreVersionError,
    UnknownContext,
)
from edge_agent.keys import chunk_spans, profile_set_digest, text_digest
from edge_agent.store import ContextStore, StoredContext

MODEL = b"m" * 32
PROFILE = profile_set_digest([])
LEVELS = ("fp16", "cachegen:1")


class FailingOps(FileOps):
    """Fails the operation with this number, once."""

    def __init__(self, fail_at: int, code: int) -> None:
        self.count = 0
        self.fail_at = fail_at
        self.code = code

    def _step(self) -> None:
        self.count += 1
        if self.count == self.fail_at:
            raise OSError(self.code, os.strerror(self.code))

    def make_dir(self, path: Path) -> None:
        self._step()
        super().make_dir(path)

    def write_new(self, path: Path, data: bytes) -> None:
        # A disk that fills up leaves a part of the file behind.
        try:
            self._step()
        except OSError:
            super().write_new(path, data[: len(data) // 2])
            raise
        super().write_new(path, data)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def sync_dir(self, path: Path) -> None:
        self._step()
        super().sync_dir(path)


def make_context(name: str, ids: list[int], *, chunk_tokens: int = 4) -> StoredContext:
    return StoredContext(
        context_id=name,
        tenant="t",
        model_digest=MODEL,
        profile_digest=PROFILE,
        text_digest=text_digest(name),
        text_chars=len(name),
        token_ids=tuple(ids),
        spans=chunk_spans(
            ids, chunk_tokens=chunk_tokens, model_digest=MODEL, profile_digest=PROFILE, tenant="t"
        ),
        created_at=0.0,
    )


def payload(key: bytes, level: str, num_bytes: int = 100) -> bytes:
    return (key + level.encode()).ljust(num_bytes, b".")


def ingest(store: ContextStore, context: StoredContext, num_bytes: int = 100) -> None:
    with store.begin_ingest() as job:
        for span in context.spans:
            for level in job.missing_levels(span.key, LEVELS):
                job.put(span.key, level, payload(span.key, level, num_bytes))
        job.commit(context)


def chunk_paths(root: Path) -> list[Path]:
    return [
        path
        for path in root.rglob("*")
        if path.is_file() and "index" not in path.name and path.name != "lock"
    ]


def open_store(root: Path, **options: object) -> ContextStore:
    return ContextStore(root, **{"quota_bytes": 10_000, "wall_clock": lambda: 7.0, **options})  # type: ignore[arg-type]


def test_what_is_stored_comes_back_after_a_restart(tmp_path: Path) -> None:
    context = make_context("doc", list(range(10)))
    with open_store(tmp_path) as store:
        ingest(store, context)
    with open_store(tmp_path) as store:
        assert store.num_repaired == 0
        back = store.get("doc")
        assert back.token_ids == context.token_ids
        assert back.spans == context.spans
        assert back.created_at == 7.0
        for span in back.spans:
            for level in LEVELS:
                assert store.read_chunk(span.key, level) == payload(span.key, level)
        (info,) = store.list_contexts()
        assert (info.num_tokens, info.num_chunks) == (10, 3)
        assert info.bytes_by_level == {"fp16": 300, "cachegen:1": 300}
        assert store.describe("doc") == info
        assert store.usage().num_bytes == 600


def test_unknown_context_is_named(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for call in (store.get, store.describe, store.delete):
            with pytest.raises(UnknownContext, match="'nope'"):
                call("nope")
        with pytest.raises(UnknownContext), store.use("nope"):
            pass


def test_context_without_tokens_is_listed_with_zero_chunks(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        ingest(store, make_context("empty", []))
        assert store.describe("empty").num_chunks == 0


def test_an_ingest_that_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    context = make_context("doc", list(range(10)))
    with open_store(tmp_path) as store:
        with store.begin_ingest() as job:
            job.missing_levels(context.spans[0].key, LEVELS)
            job.put(context.spans[0].key, "fp16", b"x" * 10)
            assert store.list_contexts() == []
        assert store.usage().num_bytes == 0
    assert chunk_paths(tmp_path) == []


def test_shared_chunks_are_stored_once_and_live_until_the_last_context_goes(tmp_path: Path) -> None:
    first = make_context("first", [1, 2, 3, 4, 5])
    second = make_context("second", [1, 2, 3, 4, 9])
    shared = first.spans[0].key
    assert second.spans[0].key == shared
    with open_store(tmp_path) as store:
        ingest(store, first)
        ingest(store, second)
        assert store.usage().num_bytes == 3 * 2 * 100
        store.delete("first")
        assert store.read_chunk(shared, "fp16")
        assert store.usage().num_bytes == 2 * 2 * 100
        store.delete("second")
        assert store.usage().num_bytes == 0
    assert chunk_paths(tmp_path) == []


def test_same_id_with_same_content_is_taken_again_and_other_content_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        ingest(store, make_context("doc", [1, 2, 3]))
        ingest(store, make_context("doc", [1, 2, 3]))
        with pytest.raises(ContextConflict, match="doc"):
            ingest(store, make_context("doc", [1, 2, 4]))
        assert store.get("doc").token_ids == (1, 2, 3)
        assert store.usage().num_bytes == 200


def test_least_recently_used_context_is_evicted_first(tmp_path: Path) -> None:
    evicted: list[str] = []
    with open_store(tmp_path, quota_bytes=450, on_evict=evicted.append) as store:
        ingest(store, make_context("old", [1]))
        ingest(store, make_context("new", [2]))
        with store.use("old"):
            pass
        ingest(store, make_context("third", [3]))
        assert [info.context_id for info in store.list_contexts()] == ["third", "old"]
        assert store.usage().num_evicted == len(evicted) == 1
        assert evicted == ["new"]
        assert store.usage().num_bytes == 400


def test_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    with open_store(tmp_path, quota_bytes=450) as store:
        ingest(store, make_context("old", [1]))
        ingest(store, make_context("new", [2]))
        with store.use("old"):
            pass
    with open_store(tmp_path, quota_bytes=450) as store:
        ingest(store, make_context("third", [3]))
        assert [info.context_id for info in store.list_contexts()] == ["third", "old"]


def test_context_in_use_is_never_evicted(tmp_path: Path) -> None:
    busy = make_context("busy", [1])
    with open_store(tmp_path, quota_bytes=250) as store:
        ingest(store, busy)
        with store.use("busy"):
            with pytest.raises(StoreFull, match="250"):
                ingest(store, make_context("more", [2]))
            assert store.read_chunk(busy.spans[0].key, "fp16")
        ingest(store, make_context("more", [2]))
        assert [info.context_id for info in store.list_contexts()] == ["more"]


def test_deleting_a_context_in_use_keeps_its_chunks_until_the_end_of_use(tmp_path: Path) -> None:
    context = make_context("doc", [1])
    with open_store(tmp_path) as store:
        ingest(store, context)
        with store.use("doc"):
            store.delete("doc")
            assert store.read_chunk(context.spans[0].key, "fp16")
            with pytest.raises(UnknownContext):
                store.get("doc")
        with pytest.raises(CorruptChunk):
            store.read_chunk(context.spans[0].key, "fp16")
        assert store.usage().num_bytes == 0


def test_quota_smaller_than_one_chunk_is_store_full_and_leaves_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path, quota_bytes=150) as store:
        with pytest.raises(StoreFull):
            ingest(store, make_context("doc", [1]))
        assert store.usage().num_bytes == 0
    assert chunk_paths(tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data + b"x",
    ],
    ids=["truncated", "empty", "bit flip", "longer"],
)
def test_damaged_file_is_a_typed_error_and_never_served(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    context = make_context("doc", [1])
    key = context.spans[0].key
    with open_store(tmp_path) as store:
        ingest(store, context)
        path = next(path for path in chunk_paths(tmp_path) if "fp16" in path.name)
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(CorruptChunk, match="fp16"):
            store.read_chunk(key, "fp16")
        assert store.chunk_sizes(context) == [{"cachegen:1": 100}]
        assert store.usage().num_corrupt == 1
        assert not path.exists()


def test_file_that_vanished_is_dropped_at_the_next_start(tmp_path: Path) -> None:
    context = make_context("doc", [1])
    with open_store(tmp_path) as store:
        ingest(store, context)
    next(path for path in chunk_paths(tmp_path) if "fp16" in path.name).unlink()
    with open_store(tmp_path) as store:
        assert store.num_repaired == 1
        assert store.chunk_sizes(context) == [{"cachegen:1": 100}]


def test_left_over_files_are_removed_at_start(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        ingest(store, make_context("doc", [1]))
    (tmp_path / "incoming" / "123-4").write_bytes(b"half")
    folder = tmp_path / "chunks" / "ab"
    folder.mkdir(exist_ok=True)
    (folder / ("ab" + "0" * 62 + ".fp16.kvchunk")).write_bytes(b"unindexed")
    with open_store(tmp_path) as store:
        assert store.num_repaired == 2
        assert len(chunk_paths(tmp_path)) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_failing_every_file_operation_in_turn_stores_nothing_by_half(
    tmp_path: Path, code: int
) -> None:
    context = make_context("doc", list(range(6)))
    for fail_at in range(1, 1000):
        root = tmp_path / str(fail_at)
        ops = FailingOps(fail_at, code)
        try:
            with open_store(root, ops=ops) as store:
                ingest(store, context)
        except StoreFull:
            assert code == errno.ENOSPC
        except StoreIOError:
            assert code != errno.ENOSPC
        else:
            break
        with open_store(root) as store:
            # Either nothing is there, or everything is and reads back.
            assert store.list_contexts() == []
            assert store.usage().num_bytes == 0
            assert chunk_paths(root) == []
            ingest(store, context)
            for span in context.spans:
                assert store.read_chunk(span.key, "fp16") == payload(span.key, "fp16")
    assert fail_at > 10


def test_a_full_disk_leaves_the_store_usable_in_the_same_process(tmp_path: Path) -> None:
    ops = FailingOps(8, errno.ENOSPC)
    with open_store(tmp_path, ops=ops) as store:
        with pytest.raises(StoreFull):
            ingest(store, make_context("doc", list(range(6))))
        assert store.usage().num_bytes == 0
        assert chunk_paths(tmp_path) == []
        ingest(store, make_context("doc", list(range(6))))
        assert store.usage().num_bytes == 400


def test_disk_error_while_reading_keeps_the_chunk(tmp_path: Path) -> None:
    class NoRead(FileOps):
        fails = False

        def read(self, path: Path) -> bytes:
            if self.fails:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(path)

    ops = NoRead()
    context = make_context("doc", [1])
    with open_store(tmp_path, ops=ops) as store:
        ingest(store, context)
        ops.fails = True
        with pytest.raises(StoreIOError):
            store.read_chunk(context.spans[0].key, "fp16")
        ops.fails = False
        assert store.read_chunk(context.spans[0].key, "fp16")


def test_store_of_another_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    with sqlite3.connect(tmp_path / "index.sqlite3") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreVersionError, match="schema version 99, this program reads version 1"):
        open_store(tmp_path)


def test_index_that_is_not_a_database_is_a_typed_error(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "index.sqlite3").write_bytes(b"nonsense" * 1000)
    with pytest.raises(StoreIOError, match="index"):
        open_store(tmp_path)


def test_second_process_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path), pytest.raises(StoreLocked, match="another process"):
        open_store(tmp_path)
    open_store(tmp_path).close()


def test_longest_stored_prefix_of_a_text_is_found(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        ingest(store, make_context("The report", [1]))
        ingest(store, make_context("The report of May", [2]))
        found = store.find_by_text("The report of May\n\nSum?", tenant="t", model_digest=MODEL)
        assert found is not None
        assert found.context_id == "The report of May"
        assert store.find_by_text("The repo", tenant="t", model_digest=MODEL) is None
        assert store.find_by_text("The report", tenant="u", model_digest=MODEL) is None
        assert store.find_by_text("The report", tenant="t", model_digest=b"n" * 32) is None


def test_reads_run_while_others_write(tmp_path: Path) -> None:
    context = make_context("doc", list(range(40)))
    with open_store(tmp_path, quota_bytes=10**7) as store:
        ingest(store, context)
        stop = threading.Event()

        def read() -> int:
            count = 0
            while not stop.is_set():
                for span in context.spans:
                    assert store.read_chunk(span.key, "fp16") == payload(span.key, "fp16")
                    count += 1
            return count

        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            for name in range(5):
                ingest(store, make_context(f"c{name}", [name] * 9), num_bytes=5000)
                store.delete(f"c{name}")
            stop.set()
            assert all(reader.result() > 0 for reader in readers)
        assert store.usage().num_bytes == 2 * 10 * 100


def test_two_ingests_of_one_text_at_once_agree(tmp_path: Path) -> None:
    context = make_context("doc", list(range(40)))
    with open_store(tmp_path) as store:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: ingest(store, context), range(4)))
        assert store.usage().num_bytes == 2 * 10 * 100
        assert len(chunk_paths(tmp_path)) == 20


def test_unsafe_level_name_never_becomes_a_path(tmp_path: Path) -> None:
    with (
        open_store(tmp_path) as store,
        store.begin_ingest() as job,
        pytest.raises(StoreError, match="level name"),
    ):
        job.put(b"k" * 32, "../../etc", b"x")


WRITER = """
import sys, itertools
from pathlib import Path
from tests.edge_agent.test_store import ingest, make_context, open_store
store = open_store(Path(sys.argv[1]), quota_bytes=10**9)
print("ready", flush=True)
for n in itertools.count():
    ingest(store, make_context(f"c{n}", [n] * 10), num_bytes=200_000)
    print(n, flush=True)
"""


def test_kill_9_in_the_middle_of_an_ingest_leaves_only_whole_contexts(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for _ in range(3):
            last = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        child.wait()
    with open_store(tmp_path, quota_bytes=10**9) as store:
        names = {info.context_id for info in store.list_contexts()}
        # What was reported as stored is there.
        assert {f"c{n}" for n in range(last + 1)} <= names
        for name in names:
            context = store.get(name)
            for span in context.spans:
                for level in LEVELS:
                    assert store.read_chunk(span.key, level) == payload(span.key, level, 200_000)
        expected = {f"{s.key.hex()}" for n in names for s in store.get(n).spans}
        assert {path.name[:64] for path in chunk_paths(tmp_path)} == expected
