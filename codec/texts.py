"""Calibration texts that every machine with Python has, or that this file makes up: no download, no corpus.

Part of the command-line shell (it reads files of the Python installation). Each text comes in two disjoint
parts: one to calibrate on, one to validate on.
"""

from __future__ import annotations

import ast
import importlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

__all__ = ["CalibrationText", "machine_texts", "read_texts"]

# Modules whose source is used. argparse and zipfile are not among them: evaluation uses those.
_CODE = [
    "ast",
    "collections/__init__",
    "configparser",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "dis",
    "doctest",
    "enum",
    "fractions",
    "ftplib",
    "functools",
    "gettext",
    "gzip",
    "heapq",
    "http/client",
    "imaplib",
    "inspect",
    "ipaddress",
    "json/decoder",
    "locale",
    "logging/__init__",
    "mailbox",
    "mimetypes",
    "pathlib",
    "pdb",
    "pickle",
    "plistlib",
    "pprint",
    "queue",
    "random",
    "selectors",
    "shelve",
    "shutil",
    "smtplib",
    "socket",
    "ssl",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "tokenize",
    "trace",
    "traceback",
    "turtle",
    "typing",
    "unittest/case",
    "unittest/mock",
    "urllib/parse",
    "uuid",
    "warnings",
    "weakref",
    "xml/dom/minidom",
    "zipapp",
]
_PROSE_SEED = 20260101

PIECE_CHARACTERS = 2_500
"""Characters taken from each file or topic: a context of a few thousand tokens then sees several."""


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A text and where it comes from."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """BLAKE3 of the UTF-8 text, hex."""
        return blake3(self.text.encode()).hexdigest()


def machine_texts(*, held_out: bool) -> list[CalibrationText]:
    """Return the built-in texts: code, docstrings, reference prose, made-up dialogue and records.

    Args:
        held_out: the validation part instead of the calibration part.
    """
    part = 1 if held_out else 0
    paths = [Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py" for name in _CODE]
    sources = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    topics = importlib.import_module("pydoc_data.topics").topics
    reference = [_without_repeats([text]) for _, text in sorted(topics.items())]
    rng = _Dice(_PROSE_SEED + part)
    sources = sources[part::2]
    return [
        CalibrationText("python-source", "\n\n".join(_middle(source) for source in sources)),
        CalibrationText("python-docstrings", _without_repeats(map(_docstrings, sources))),
        CalibrationText("python-reference", _without_repeats(reference[part::2])),
        CalibrationText("made-up-dialogue", _dialogue(rng)),
        CalibrationText("made-up-stories", _stories(rng)),
        CalibrationText("made-up-records", _records(rng)),
    ]


def read_texts(paths: list[Path]) -> list[CalibrationText]:
    """Read files, and every .txt, .md, .rst and .py file in folders, as UTF-8.

    Raises:
        OSError: a file cannot be read.
        UnicodeDecodeError: a file is not UTF-8.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += [
                f for f in sorted(path.rglob("*")) if f.suffix in (".txt", ".md", ".rst", ".py")
            ]
        else:
            files.append(path)
    return [CalibrationText(path.name, path.read_text(encoding="utf-8")) for path in files]


class _Dice:
    """SplitMix64: the same text on every machine and Python, which `random` does not promise."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def bits(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) % 2**64
        mixed = (self._state ^ (self._state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        return mixed ^ (mixed >> 31)

    def randint(self, low: int, high: int) -> int:
        return low + self.bits() % (high - low + 1)

    def choice(self, options: list[str]) -> str:
        return options[self.bits() % len(options)]

    def sample(self, options: list[str], count: int) -> list[str]:
        left = list(options)
        return [left.pop(self.bits() % len(left)) for _ in range(count)]


def _middle(source: str) -> str:
    """A piece of a file that is code rather than its opening comment."""
    start = source.find("\n", len(source) // 3) + 1
    return source[start : source.find("\n", start + PIECE_CHARACTERS)]


def _without_repeats(pieces: Iterable[str]) -> str:
    """Cut pieces short, so that many fit into a context, and drop paragraphs seen before."""
    seen: set[str] = set()
    out = []
    for piece in pieces:
        for paragraph in piece[:PIECE_CHARACTERS].split("\n\n"):
            if paragraph not in seen:
                seen.add(paragraph)
                out.append(paragraph)
    return "\n\n".join(out)


def _docstrings(source: str) -> str:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 80:
                found.append(text)
    return "\n\n".join(found)


_PEOPLE = [
    "Ada",
    "Boris",
    "Chen",
    "Dolores",
    "Emil",
    "Fatima",
    "Goran",
    "Hana",
    "Ivo",
    "Jun",
    "Kofi",
    "Lena",
    "Mateo",
    "Nadia",
    "Olu",
    "Priya",
    "Quinn",
    "Rosa",
    "Sven",
    "Tamar",
]
_PLACES = [
    "the harbour",
    "the old library",
    "a kitchen in the north of the city",
    "the ferry to the islands",
    "the town hall",
    "a farm above the river",
    "the night train",
    "the repair shop",
    "the observatory",
    "a crowded market",
]
_THINGS = [
    "the broken pump",
    "a letter without a sender",
    "the budget for spring",
    "a crate of pears",
    "the missing keys",
    "the new timetable",
    "a map drawn by hand",
    "the generator",
    "an unpaid bill",
    "the choir's old piano",
    "the flood wall",
    "a box of photographs",
]
_FEELINGS = [
    "relieved",
    "tired but certain",
    "in no mood for jokes",
    "curious",
    "ashamed of the delay",
    "proud",
    "uneasy",
    "calm",
    "surprised by the price",
    "grateful",
]
_CLAIMS = [
    "We cannot decide this before {person} has seen {thing}.",
    "I went to {place} yesterday, and nobody knew about {thing}.",
    "If it rains again, {place} will be closed until Monday.",
    "Somebody has to pay for {thing}, and it will not be me.",
    "The last time we tried that, it took {n} days and cost {m} euros.",
    "{person} says that {thing} can wait, but I am not so sure.",
    "Let us count again: {n} boxes came in, {k} went out, so {m} should be left.",
    "My grandmother used to keep {thing} under the stairs.",
    "There is a simple reason: the road from {place} is only open in summer.",
    "Nothing in the contract says that {thing} belongs to us.",
]
_ANSWERS = [
    "That is true, although {person} remembers it differently.",
    "Why was I not told?",
    "Then let us meet at {place} at {h} o'clock.",
    "I will ask {person} and write to you tonight.",
    "No. Look at the numbers once more.",
    "Fine, but only if {thing} is ready by then.",
    "You are {feeling}, I can hear it.",
    "I do not agree, and I will say so at the meeting.",
    "Could you explain that to me again, slowly?",
]
_STORY = [
    "In the winter of {year}, {person} left {place} with nothing but {thing}.",
    "The snow had stopped, yet the wind still came from the sea, and {person} felt {feeling}.",
    "Nobody at {place} asked questions in those days; people had enough to do.",
    "It was {other} who first noticed {thing}, half hidden behind the door.",
    "For {n} years they had not spoken, and now there seemed to be no word small enough to begin with.",
    '"Take it," said {other}, "before I change my mind."',
    "By evening the lamps along the quay were lit, one after another, and the water turned from grey to black.",
    "{person} laughed, which surprised them both.",
    "What happened next has been told in many ways, and each of them is a little wrong.",
    "At {place} the clock struck {h}, and the story might have ended there, had it not been for {thing}.",
]


def _fill(rng: _Dice, pattern: str) -> str:
    return pattern.format(
        person=rng.choice(_PEOPLE),
        other=rng.choice(_PEOPLE),
        place=rng.choice(_PLACES),
        thing=rng.choice(_THINGS),
        feeling=rng.choice(_FEELINGS),
        n=rng.randint(2, 40),
        k=rng.randint(2, 40),
        m=rng.randint(41, 9000),
        h=rng.randint(1, 12),
        year=rng.randint(1820, 1999),
    )


def _dialogue(rng: _Dice) -> str:
    lines = []
    for meeting in range(1, 41):
        people = rng.sample(_PEOPLE, 4)
        lines.append(
            f"Meeting {meeting}, at {rng.choice(_PLACES)}. Present: {', '.join(people)}.\n"
        )
        for _ in range(rng.randint(12, 24)):
            said = " ".join(
                _fill(rng, rng.choice(_CLAIMS + _ANSWERS)) for _ in range(rng.randint(1, 3))
            )
            lines.append(f"{rng.choice(people)}: {said}")
        lines.append(f"Decided: {_fill(rng, rng.choice(_CLAIMS))}\n")
    return "\n".join(lines)


def _stories(rng: _Dice) -> str:
    return "\n\n".join(
        " ".join(_fill(rng, rng.choice(_STORY)) for _ in range(rng.randint(4, 9)))
        for _ in range(160)
    )


def _records(rng: _Dice) -> str:
    lines = []
    for number in range(600):
        person, code = rng.choice(_PEOPLE), f"{rng.bits() >> 32:08x}"
        kind = number // 20 % 3
        if kind == 0:
            lines.append(
                f'{{"id": {number}, "name": "{person}", "token": "{code}", "amount": {rng.randint(1, 999)}.{rng.randint(0, 99):02d}}}'
            )
        elif kind == 1:
            lines.append(
                f"{number};{person};{rng.choice(_PLACES)};{rng.randint(1, 28):02d}.{rng.randint(1, 12):02d}.2024;{rng.randint(100, 99999)}"
            )
        else:
            lines.append(
                f"2024-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d} {rng.randint(0, 23):02d}:{rng.randint(0, 59):02d} INFO node{rng.randint(1, 9)} request={code} took {rng.randint(1, 900)} ms"
            )
    return "\n".join(lines)
