from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from codec.kernels import build


def test_library_was_built_from_the_sources_beside_it() -> None:
    library = build.load_library()
    library.kv_source_digest.restype = ctypes.c_char_p
    assert library.kv_source_digest().decode() == build.source_digest()


def test_stale_library_is_compiled_again(tmp_path: Path) -> None:
    target = tmp_path / "_native.so"
    fresh = build._compile(target, "a digest", "test")
    library = ctypes.CDLL(str(fresh))
    library.kv_source_digest.restype = ctypes.c_char_p
    assert library.kv_source_digest() == b"a digest"
    assert target.read_bytes() == fresh.read_bytes()


def test_no_compiler_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.NativeLibraryError, match="no-such-compiler to build it"):
        build._compile(tmp_path / "_native.so", "x", "_native.so is missing")


def test_no_flag_ties_the_library_to_one_processor() -> None:
    assert not [flag for flag in build.COMPILE_FLAGS if flag.startswith("-m")]
    assert "-ffp-contract=off" in build.COMPILE_FLAGS


def test_every_kernel_file_is_part_of_the_digest() -> None:
    on_disk = {path.name for path in build.KERNELS.iterdir() if path.suffix in (".h", ".cpp")}
    assert on_disk == set(build.SOURCES)
