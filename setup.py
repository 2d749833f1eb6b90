"""Builds the native codec kernel into the wheel; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "codec._native",
            sources=["codec/kernels/entry_cpu.cpp"],
            depends=["codec/kernels"],
            # -ffp-contract=off: CPU and GPU must round alike. No -march: one binary per architecture.
            extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
            language="c++",
        )
    ]
)
