"""Contexts come from the bundled text or from files in known formats; every fault is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scenarios import workload
from scenarios.config import parse_scenario
from scenarios.errors import FileFormatError
from scenarios.workload import TextFormat, build_context, handbook, load_texts, shorten


def test_bundled_text_has_its_digest_and_an_altered_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "Lower Aune" in handbook()
    monkeypatch.setattr(workload, "HANDBOOK_SHA256", "0" * 64)
    with pytest.raises(FileFormatError, match="not the bundled text"):
        handbook()


def test_shortened_text_is_whole_paragraphs_from_the_front() -> None:
    short = shorten(handbook(), 1000)
    assert handbook().startswith(short)
    assert handbook()[len(short) : len(short) + 2] == "\n\n"
    assert 0.8 * 1000 < len(short) / workload.CHARS_PER_TOKEN <= 1000
    assert shorten("one paragraph", 1) == "one paragraph"
    assert shorten("a\n\nb", 0) == "a\n\nb"


def test_contexts_with_equal_first_parts_share_a_prefix(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ending a", encoding="utf-8")
    (tmp_path / "b.txt").write_text("ending b", encoding="utf-8")
    contexts = "".join(
        f'[[contexts]]\nname = "{n}"\nparts = [{{text = "handbook", tokens = 300}}, "{n}.txt"]\n'
        for n in "ab"
    )
    text = 'summary = "s"\npolicies = ["text"]\nquestions = ["?"]\n' + contexts
    scenario = parse_scenario(text, source=tmp_path / "s.toml")
    first, second = (build_context(scenario, context) for context in scenario.contexts)
    head = shorten(handbook(), 300)
    assert first == head + "\n\nending a"
    assert second == head + "\n\nending b"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_formats_are_recognized_and_read(tmp_path: Path) -> None:
    plain = write(tmp_path, "a.txt", "hello")
    assert load_texts(plain)[0].text == "hello"
    jsonl = write(tmp_path, "a.jsonl", '{"text": "one"}\n\n{"text": "two"}\n')
    assert [t.text for t in load_texts(jsonl)] == ["one", "two"]
    topics = {"prompt": "USER: hi", "topics": ["bees", "trees"]}
    lines = {"prompt": "line a: 7", "expected_number": 7, "random_idx": ["a-b", 0]}
    chat = write(tmp_path, "c.jsonl", json.dumps(topics) + "\n" + json.dumps(lines) + "\n")
    first, second = load_texts(chat)
    assert first.questions[0][1] == "bees"
    assert second.questions == (("What is the REGISTER_CONTENT in line a-b?", "7"),)
    squad = {
        "data": [
            {
                "paragraphs": [
                    {"context": "p1", "qas": [{"question": "q", "answers": [{"text": "a"}]}]},
                    {"context": "p2", "qas": []},
                ]
            }
        ]
    }
    (article,) = load_texts(write(tmp_path, "s.json", json.dumps(squad)))
    assert (article.text, article.questions) == ("p1\n\np2", (("q", "a"),))
    meeting = {
        "meeting_transcripts": [{"speaker": "A", "content": "hm"}],
        "specific_query_list": [{"query": "what?", "answer": "hm"}],
    }
    (talk,) = load_texts(write(tmp_path, "q.json", json.dumps(meeting)))
    assert (talk.text, talk.questions) == ("A: hm", (("what?", "hm"),))


@pytest.mark.parametrize(
    ("name", "content", "line", "problem"),
    [
        ("a.txt", " \n", None, "is empty"),
        ("a.jsonl", '{"text": "x"}\n{"txt": 1}\n', 2, "no text in the field 'text'"),
        ("a.jsonl", '{"text": "x"}\n{oops\n', 2, "is no JSON"),
        ("a.jsonl", "[1]\n", 1, "no object"),
        ("a.jsonl", '{"prompt": "x", "topics": []}\n', 1, "'topics'"),
        ("a.jsonl", '{"prompt": "x", "expected_number": 1}\n', 1, "'random_idx'"),
        ("a.json", "{", 1, "is no JSON"),
        ("a.json", "{}", None, "'data'"),
        ("a.json", '{"data": [{"paragraphs": [{}]}]}', None, r"data\[0\]"),
        ("a.json", '{"meeting_transcripts": [{"speaker": "A"}]}', None, "no QMSum meeting"),
        ("a.json", '{"meeting_transcripts": []}', None, "without a word"),
    ],
)
def test_fault_names_file_and_line(
    tmp_path: Path, name: str, content: str, line: int | None, problem: str
) -> None:
    with pytest.raises(FileFormatError, match=problem) as caught:
        load_texts(write(tmp_path, name, content))
    assert caught.value.line == line


def test_text_that_is_not_utf8_or_has_no_such_item_is_named(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FileFormatError, match="not text in UTF-8"):
        load_texts(path)
    write(tmp_path, "one.txt", "x")
    text = (
        'summary = "s"\npolicies = ["text"]\nquestions = ["?"]\n'
        '[[contexts]]\nname = "c"\nparts = [{text = "one.txt", item = 1}]\n'
    )
    scenario = parse_scenario(text, source=tmp_path / "s.toml")
    with pytest.raises(FileFormatError, match="no item 1"):
        build_context(scenario, scenario.contexts[0])


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "text_format", "num_texts"),
    [
        ("qa/xquad.en.json", TextFormat.SQUAD, 48),
        ("retrieval/longchat_1_topics.first50.jsonl", TextFormat.LONGCHAT, 50),
        ("retrieval/longchat_200_lines.first12.jsonl", TextFormat.LONGCHAT, 12),
        ("dialogue/qmsum_IS1003a.json", TextFormat.QMSUM, 1),
        ("technical/debian-reference.en.first200k.txt", TextFormat.PLAIN, 1),
    ],
)
def test_real_files_are_read_as_their_format(
    data_dir: Path, name: str, text_format: TextFormat, num_texts: int
) -> None:
    path = data_dir / "text" / name
    texts = load_texts(path)
    assert texts == load_texts(path, text_format=text_format)
    assert len(texts) == num_texts
    assert all(text.text.strip() for text in texts)
    if text_format in (TextFormat.SQUAD, TextFormat.LONGCHAT, TextFormat.QMSUM):
        assert all(text.questions for text in texts)
