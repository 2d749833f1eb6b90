from __future__ import annotations

from pathlib import Path

import pytest

from codec.texts import machine_texts, read_texts

# Made from a seed alone, so the same everywhere; a change here changes shipped profiles' notes.
MADE_UP = {
    False: {
        "made-up-dialogue": "7cbfb0785b57714b",
        "made-up-stories": "d67c7cfc4a785629",
        "made-up-records": "3e16372d109d643d",
    },
    True: {
        "made-up-dialogue": "18bbf675d91045c5",
        "made-up-stories": "e4a722ca5e3a117a",
        "made-up-records": "0bf356054d2094bf",
    },
}


@pytest.mark.parametrize("held_out", [False, True])
def test_made_up_texts_are_the_same_on_every_machine(held_out: bool) -> None:
    found = {text.name: text.digest[:16] for text in machine_texts(held_out=held_out)}
    for name, digest in MADE_UP[held_out].items():
        assert found[name] == digest


def test_both_parts_are_long_and_share_next_to_nothing() -> None:
    parts = [machine_texts(held_out=held_out) for held_out in (False, True)]
    assert [text.name for text in parts[0]] == [text.name for text in parts[1]]
    for one, other in zip(*parts, strict=True):
        assert min(len(one.text), len(other.text)) > 20_000
        paragraphs = [{p for p in t.text.split("\n\n") if len(p) > 100} for t in (one, other)]
        # The language reference repeats a few grammar rules from topic to topic.
        assert len(paragraphs[0] & paragraphs[1]) <= 0.05 * len(paragraphs[0])


def test_folders_are_read_in_order_and_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "sub" / "c.md").write_text("three")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "x.bin").write_bytes(b"\xff")
    assert [text.text for text in read_texts([tmp_path])] == ["one", "two", "three"]
    assert read_texts([tmp_path / "b.txt"])[0].name == "b.txt"
    with pytest.raises(FileNotFoundError):
        read_texts([tmp_path / "none.txt"])
