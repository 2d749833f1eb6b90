from __future__ import annotations

import argparse
from pathlib import Path

import codec
from codec.cli import _parser
from codec.levels import LevelSet

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "codec.md").read_text(encoding="utf-8")


def test_every_command_and_flag_is_documented() -> None:
    commands = next(
        action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    for name, parser in commands.choices.items():
        assert f"| `{name} " in TEXT
        for action in parser._actions:
            for flag in action.option_strings:
                if flag.startswith("--") and flag != "--help":
                    assert f"| `{flag}` |" in TEXT


def test_every_error_is_documented() -> None:
    for name in codec.__all__:
        thing = getattr(codec, name)
        if isinstance(thing, type) and issubclass(thing, codec.CodecError):
            assert f"`{name}`" in TEXT


def test_format_constants_are_those_of_the_document() -> None:
    page = (DOCS / "bitstream.md").read_text(encoding="utf-8")
    assert "`KVTB`" in page
    assert "`KVTP`" in page
    for level_set in LevelSet:
        assert f"{level_set.wire_id} `{level_set}`" in page


def test_the_table_of_levels_is_the_bundled_profiles() -> None:
    path = DOCS.parent / "codec/profiles/smollm2-135m.cachegen.kvprofile"
    for info in codec.Profile.load(path).levels:
        assert info.top1 is not None
        row = f"| `{info.name}` | {info.bits_per_element:.2f} | {info.kl:.5f} | {info.ppl_ratio:.4f} | "
        assert f"{row}{100 * info.top1:.2f} % |" in TEXT
