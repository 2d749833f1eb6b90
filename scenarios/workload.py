"""Contexts as texts: the bundled one, and files in the formats that people have them in.

Invariant: the bundled text has the digest written here, so two machines ask the same questions about
the same words. A file is read whole or refused with its name and line. Must not know: tokenizers (a
length in tokens is aimed at by characters and whole paragraphs), programs.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scenarios.config import TEXTS_DIR, ContextSpec, Scenario, TextPart
from scenarios.errors import FileFormatError

HANDBOOK_SHA256 = "40e3b1810a97a7057bd830661d9e471a363ef8e486a28fc8d2b63bbf20785c9e"
"""Digest of the bundled text, written for this project and in no profile's calibration."""
CHARS_PER_TOKEN = 3.6
"""Characters of English prose with tables per token of SmolLM2's vocabulary, measured on the handbook."""
MAX_TEXT_BYTES = 64 * 1024 * 1024


class TextFormat(enum.StrEnum):
    """Formats of a text file."""

    PLAIN = "plain"
    """The whole file is one text."""
    JSONL = "jsonl"
    """One object a line, with a field `text`."""
    LONGCHAT = "longchat"
    """One object a line, with a field `prompt` (LongChat's test cases)."""
    SQUAD = "squad"
    """SQuAD or XQuAD: one text per article, its paragraphs joined."""
    QMSUM = "qmsum"
    """QMSum: one meeting, `speaker: words` a line."""


@dataclass(frozen=True, slots=True)
class SourceText:
    """One text of a file, with the questions that came with it."""

    text: str
    questions: tuple[tuple[str, str], ...] = ()
    """Question and expected answer, where the format has them."""


def build_context(scenario: Scenario, context: ContextSpec) -> str:
    """Return the text of a context.

    Raises:
        FileFormatError: a file is missing or not what its format promises.
    """
    return "\n\n".join(_part(scenario, part) for part in context.parts)


def _part(scenario: Scenario, part: TextPart) -> str:
    if part.text == "handbook":
        return shorten(handbook(), part.tokens)
    path = scenario.find_file(part.text, TEXTS_DIR)
    texts = load_texts(path, text_format=TextFormat(part.format) if part.format else None)
    if not 0 <= part.item < len(texts):
        raise FileFormatError(
            path, None, f"has {len(texts)} texts, so there is no item {part.item}"
        )
    return shorten(texts[part.item].text, part.tokens)


def handbook() -> str:
    """Return the bundled text.

    Raises:
        FileFormatError: the file is not the one that this version was made with.
    """
    path = TEXTS_DIR / "handbook.md"
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != HANDBOOK_SHA256:
        raise FileFormatError(path, None, "is not the bundled text; figures would not compare")
    return data.decode("utf-8")


def shorten(text: str, tokens: int) -> str:
    """Return whole paragraphs from the front, about so many tokens; 0 keeps all."""
    limit = tokens * CHARS_PER_TOKEN
    if not tokens or len(text) <= limit:
        return text
    kept: list[str] = []
    total = 0
    for paragraph in text.split("\n\n"):
        if kept and total + len(paragraph) > limit:
            break
        kept.append(paragraph)
        total += len(paragraph) + 2
    return "\n\n".join(kept)


def load_texts(path: Path, *, text_format: TextFormat | None = None) -> list[SourceText]:
    """Read the texts of a file.

    Args:
        path: the file, UTF-8.
        text_format: its format; None looks at name and content.

    Raises:
        FileFormatError: names file and line of the fault.
    """
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise FileFormatError(path, None, f"is larger than {MAX_TEXT_BYTES} bytes")
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(path, None, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(path, None, "is not text in UTF-8") from error
    if not content.strip():
        raise FileFormatError(path, None, "is empty")
    match text_format or _detect(path, content):
        case TextFormat.PLAIN:
            return [SourceText(content)]
        case TextFormat.JSONL:
            return [SourceText(_text(path, n, o, "text")) for n, o in _lines(path, content)]
        case TextFormat.LONGCHAT:
            return [_longchat(path, n, o) for n, o in _lines(path, content)]
        case TextFormat.SQUAD:
            return _squad(path, _json(path, content))
        case TextFormat.QMSUM:
            return [_qmsum(path, _json(path, content))]


def _detect(path: Path, content: str) -> TextFormat:
    if path.suffix == ".jsonl":
        first = next(iter(_lines(path, content.splitlines()[0])))[1]
        return TextFormat.LONGCHAT if "prompt" in first else TextFormat.JSONL
    if path.suffix == ".json":
        document = _json(path, content)
        return TextFormat.QMSUM if "meeting_transcripts" in document else TextFormat.SQUAD
    return TextFormat.PLAIN


def _json(path: Path, content: str, first_line: int = 1) -> Mapping[str, Any]:
    try:
        document = json.loads(content)
    except json.JSONDecodeError as error:
        line = error.lineno + first_line - 1
        raise FileFormatError(path, line, f"is no JSON: {error.msg}") from error
    except RecursionError as error:
        raise FileFormatError(path, first_line, "is JSON nested too deep") from error
    if not isinstance(document, dict):
        raise FileFormatError(path, first_line, "is JSON but no object")
    return document


def _lines(path: Path, content: str) -> list[tuple[int, Mapping[str, Any]]]:
    return [
        (number, _json(path, line, number))
        for number, line in enumerate(content.splitlines(), start=1)
        if line.strip()
    ]


def _text(path: Path, line: int | None, fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not value.strip():
        raise FileFormatError(path, line, f"has no text in the field {key!r}")
    return value


def _longchat(path: Path, line: int, fields: Mapping[str, Any]) -> SourceText:
    prompt = _text(path, line, fields, "prompt")
    if "topics" in fields:
        topics = fields["topics"]
        if not isinstance(topics, list) or not topics or not isinstance(topics[0], str):
            raise FileFormatError(path, line, "has no list of texts in the field 'topics'")
        return SourceText(prompt, (("What is the first topic we discussed?", topics[0]),))
    if "expected_number" in fields:
        words = fields.get("random_idx")
        if not isinstance(words, list) or not words:
            raise FileFormatError(path, line, "has no list in the field 'random_idx'")
        question = f"What is the REGISTER_CONTENT in line {words[0]}?"
        return SourceText(prompt, ((question, str(fields["expected_number"])),))
    return SourceText(prompt)


def _squad(path: Path, document: Mapping[str, Any]) -> list[SourceText]:
    texts: list[SourceText] = []
    articles = document.get("data")
    if not isinstance(articles, list) or not articles:
        raise FileFormatError(path, None, "has no list of articles in the field 'data'")
    for index, article in enumerate(articles):
        try:
            paragraphs = [str(p["context"]) for p in article["paragraphs"]]
            questions = tuple(
                (str(qa["question"]), str(qa["answers"][0]["text"]))
                for paragraph in article["paragraphs"]
                for qa in paragraph["qas"]
                if qa["answers"]
            )
        except (KeyError, TypeError, IndexError) as error:
            problem = f"data[{index}] is no article with paragraphs, contexts and qas ({error!r})"
            raise FileFormatError(path, None, problem) from error
        texts.append(SourceText("\n\n".join(paragraphs), questions))
    return texts


def _qmsum(path: Path, document: Mapping[str, Any]) -> SourceText:
    try:
        turns = [f"{t['speaker']}: {t['content']}" for t in document["meeting_transcripts"]]
        pairs = [
            (str(q["query"]), str(q["answer"]))
            for key in ("general_query_list", "specific_query_list")
            for q in document.get(key, [])
        ]
    except (KeyError, TypeError) as error:
        problem = f"is no QMSum meeting: {error!r} is missing or of the wrong type"
        raise FileFormatError(path, None, problem) from error
    if not turns:
        raise FileFormatError(path, None, "has a meeting without a word")
    return SourceText("\n\n".join(turns), tuple(pairs))
