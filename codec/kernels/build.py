"""Finds and loads the CPU library; in a source checkout, compiles it where it is missing or stale.

A wheel carries the compiled library, so a product at run time needs no compiler. A checkout that was
never installed (or whose kernels were edited) is compiled once, into the package folder, atomically.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["COMPILE_FLAGS", "LINK_FLAGS", "NativeLibraryError", "load_library", "source_digest"]

KERNELS = Path(__file__).resolve().parent
PACKAGE = KERNELS.parent

# -ffp-contract=off: CPU and GPU must round alike. No -march: one binary per architecture.
COMPILE_FLAGS = ("-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-pthread")
LINK_FLAGS = ("-pthread",)
SOURCES = (
    "portable.h",
    "rangecoder.h",
    "quantize.h",
    "cachegen.h",
    "klt.h",
    "klt_cpu.h",
    "entry_cpu.cpp",
)


class NativeLibraryError(ImportError):
    """The CPU library is not there and cannot be built."""


def source_digest() -> str | None:
    """Return a digest of the kernels' sources; None in an installation that carries no sources."""
    digest = hashlib.sha256()
    for name in SOURCES:
        path = KERNELS / name
        if not path.exists():
            return None
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


@functools.cache
def load_library() -> ctypes.CDLL:
    """Return the CPU library, compiled from the sources that lie beside this file.

    Raises:
        NativeLibraryError: there is none, and no compiler or no sources to make one.
    """
    wanted = source_digest()
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    path = PACKAGE / f"_native{suffix}"
    reason = f"{path.name} is not in {PACKAGE}"
    if path.exists():
        library = ctypes.CDLL(str(path))
        library.kv_source_digest.restype = ctypes.c_char_p
        if wanted is None or library.kv_source_digest() == wanted.encode():
            return library
        reason = f"{path.name} was built from other sources"
    if wanted is None:
        raise NativeLibraryError(f"{reason}; reinstall kvtide")
    return ctypes.CDLL(str(_compile(path, wanted, reason)))


def _compile(path: Path, digest: str, reason: str) -> Path:
    """Build the library and move it into place.

    The path may already be mapped by this process under the same name, so what is returned is a fresh
    name that the loader does not know; it is removed by the temporary folder's next clean-up.
    """
    compiler = os.environ.get("CXX", "g++")
    folder = tempfile.mkdtemp(prefix="kvtide-native-")
    fresh = Path(folder) / path.name
    command = [
        compiler,
        *COMPILE_FLAGS,
        f'-DKV_SOURCE_DIGEST="{digest}"',
        "-fPIC",
        "-shared",
        str(KERNELS / "entry_cpu.cpp"),
        "-o",
        str(fresh),
        *LINK_FLAGS,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NativeLibraryError(f"{reason}, and there is no {compiler} to build it") from error
    except subprocess.CalledProcessError as error:
        raise NativeLibraryError(f"{reason}, and building it failed: {error.stderr}") from error
    try:
        staged = path.with_name(f"{path.name}.{os.getpid()}")
        staged.write_bytes(fresh.read_bytes())
        staged.replace(path)
    except OSError:
        return fresh  # a read-only installation: use what was built, do not keep it
    return fresh
