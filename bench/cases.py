"""What quality is measured on: texts that go on, and questions about text far back. From the data folder's `text`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "Case", "answer_score", "cases_of"]

CONTINUATION_TOKENS = 256
PLACES = {
    "prose": "prose/news_from_nowhere_pg3261.txt",
    "wiki": "wiki/wikitext-2.test.txt",
    "technical": "technical/debian-reference.en.first200k.txt",
    "code": "code/cpython-3.11.7_argparse.py",
    "chinese": "multilingual/debian-reference.zh-cn.first200k.txt",
}
MEETING = "dialogue/qmsum_IS1003a.json"
TOPICS = "retrieval/longchat_1_topics.first50.jsonl"
LINES = "retrieval/longchat_200_lines.first12.jsonl"
QA = "qa/xquad.en.json"
KINDS = (*PLACES, "dialogue", "topics", "lines", "passkey", "qa")
DEPTHS = 10

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """A context and what follows it."""

    kind: str
    name: str
    context: tuple[int, ...]
    tail: tuple[int, ...]
    """A text's continuation; or a question, after which the model answers."""

    answers: tuple[str, ...] = ()
    """Right answers to a question; none for a continuation."""


def cases_of(
    kind: str, folder: Path, encode: Encode, *, count: int, context_tokens: int
) -> list[Case]:
    """Return the cases of a kind, always the same ones; at most as many as the data has.

    Args:
        kind: one of KINDS.
        folder: the data folder's `text`.
        encode: from text to token ids.
        count: how many; pass keys come at ten depths, so ten are as many as there are.
        context_tokens: tokens of a context, or a few less where whole lines must fit.
    """
    makers = {"topics": _topics, "lines": _lines, "passkey": _passkeys, "qa": _questions}
    if kind in makers:
        return makers[kind](folder, encode, count, context_tokens)
    return _continuations(kind, folder, encode, count, context_tokens)


def answer_score(said: str, right: Sequence[str]) -> float:
    """Return 1 if a right answer is in what was said, letter case and punctuation aside; else 0."""
    plain = _plain(said)
    return float(any(_plain(answer) in plain for answer in right))


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _continuations(
    kind: str, folder: Path, encode: Encode, count: int, context_tokens: int
) -> list[Case]:
    if kind == "dialogue":
        meeting = json.loads((folder / MEETING).read_text(encoding="utf-8"))
        turns = meeting["meeting_transcripts"]
        text = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in turns)
    else:
        text = (folder / PLACES[kind]).read_text(encoding="utf-8")
    length = context_tokens + CONTINUATION_TOKENS
    room = 6 * length  # characters; a token is rarely longer in the mean
    starts = [int(len(text) * (i + 1) / (count + 2)) for i in range(count)]
    out = []
    for number, start in enumerate(starts):
        ids = tuple(encode(text[start : start + room])[:length])
        if len(ids) == length:
            out.append(Case(kind, f"{kind} {number}", ids[:context_tokens], ids[context_tokens:]))
    return out


def _topics(folder: Path, encode: Encode, count: int, context_tokens: int) -> list[Case]:
    rows = _json_lines(folder / TOPICS)
    opening = "USER: I would like"
    out = []
    for number in range(count):
        first = number * 5
        if first + 6 > len(rows):
            break
        prompts = [row["prompt"] for row in rows[first : first + 6]]
        bodies = [prompt[prompt.index(opening) : prompt.rindex("USER:")] for prompt in prompts]
        head = prompts[0][: prompts[0].index(opening)]
        context = encode(head + "".join(bodies))[:context_tokens]
        asked = (
            "\n USER: Now the record ends. What is the first topic we discussed? Only give me the topic name."
            " \n ASSISTANT: The first topic we discussed was"
        )
        out.append(_asked("topics", number, context, encode(asked), rows[first]["topics"][:1]))
    return out


def _lines(folder: Path, encode: Encode, count: int, context_tokens: int) -> list[Case]:
    """The asked line is the third of those that fit, so far back."""
    out = []
    for number, row in enumerate(_json_lines(folder / LINES)[:count]):
        head, _, rest = row["prompt"].partition("\n\n")
        lines = [line for line in rest.splitlines() if line.startswith("line ")]
        asked = row["correct_line"].strip()
        lines = [line for line in lines if line.strip() != asked]
        lines.insert(2, asked)
        context = encode(head + "\n\n" + "\n".join(lines))[:context_tokens]
        name = row["random_idx"][0]
        question = f"\nNow the record is over. The <REGISTER_CONTENT> in line {name} is <"
        out.append(
            _asked("lines", number, context, encode(question), [str(row["expected_number"])])
        )
    return out


def _passkeys(folder: Path, encode: Encode, count: int, context_tokens: int) -> list[Case]:
    filler = (folder / PLACES["prose"]).read_text(encoding="utf-8")[200_000:]
    out = []
    for number in range(min(count, DEPTHS)):
        key = str(10_007 + 7_919 * (number + 1))
        told = list(encode(f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"))
        room = context_tokens - len(told)
        start = number * 9_000
        ids = list(encode(filler[start : start + 6 * context_tokens]))[:room]
        place = int(room * (number + 0.5) / DEPTHS)
        context = ids[:place] + told + ids[place:]
        question = encode("\n\nWhat is the pass key? The pass key is")
        out.append(_asked("passkey", number, context, question, [key]))
    return out


def _questions(folder: Path, encode: Encode, count: int, context_tokens: int) -> list[Case]:
    """An article's first paragraph answers; its other paragraphs follow."""
    articles = json.loads((folder / QA).read_text(encoding="utf-8"))["data"]
    out = []
    for number, article in enumerate(articles[:count]):
        following = articles[(number + 1) % len(articles)]["paragraphs"]
        paragraphs = [p["context"] for p in article["paragraphs"] + following]
        asked = article["paragraphs"][0]["qas"][0]
        context = encode("\n\n".join(paragraphs))[:context_tokens]
        question = encode(f"\n\nQuestion: {asked['question']}\nShort answer:")
        right = [answer["text"] for answer in asked["answers"]]
        out.append(_asked("qa", number, context, question, right))
    return out


def _asked(
    kind: str, number: int, context: Sequence[int], question: Sequence[int], right: Sequence[str]
) -> Case:
    return Case(kind, f"{kind} {number}", tuple(context), tuple(question), tuple(right))


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
