"""Builds the native codec kernel into the wheel; everything else is in pyproject.toml."""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup

# By path: importing the package would need NumPy, which a build environment has no use for.
_spec = importlib.util.spec_from_file_location(
    "kernel_build", Path(__file__).parent / "codec" / "kernels" / "build.py"
)
assert _spec is not None
assert _spec.loader is not None
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

setup(
    ext_modules=[
        Extension(
            "codec._native",
            sources=["codec/kernels/entry_cpu.cpp"],
            depends=[f"codec/kernels/{name}" for name in build.SOURCES],
            define_macros=[("KV_SOURCE_DIGEST", f'"{build.source_digest()}"')],
            extra_compile_args=list(build.COMPILE_FLAGS),
            extra_link_args=list(build.LINK_FLAGS),
            language="c++",
        )
    ]
)
