"""Token ids to text, piece by piece, with stop strings.

Invariant: the pieces joined are a prefix of decoding all tokens at once, no piece ends within a
character, and nothing from a stop string on is ever given out. Must not know: HTTP, wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF_CHARACTER = "\ufffd"
"""What a tokenizer's decode shows for bytes that are not a whole UTF-8 character yet."""


class AnswerText:
    """The text of one answer as its tokens come in."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        """Start an empty answer.

        Args:
            decode: the tokenizer's decode.
            stop: texts that end the answer; they are not part of it.
        """
        self._decode = decode
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        # Two marks, because a token's text depends on the tokens before it (spaces, merged bytes):
        # decoding from _window on gives the context, _shown is where the text is out already.
        self._window = 0
        self._shown = 0
        self._held = ""
        self._text = ""
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All text that was given out."""
        return self._text

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now, often empty."""
        if self.is_stopped:
            return ""
        self._token_ids.append(token_id)
        before = self._decode(self._token_ids[self._window : self._shown])
        now = self._decode(self._token_ids[self._window :])
        if now.endswith(_HALF_CHARACTER) or len(now) <= len(before):
            return ""
        self._window, self._shown = self._shown, len(self._token_ids)
        return self._release(now[len(before) :], is_last=False)

    def finish(self) -> str:
        """Return what was held back, at the end of the answer."""
        if self.is_stopped:
            return ""
        before = self._decode(self._token_ids[self._window : self._shown])
        now = self._decode(self._token_ids[self._window :])
        self._window = self._shown = len(self._token_ids)
        return self._release(now[len(before) :], is_last=True)

    def _release(self, piece: str, *, is_last: bool) -> str:
        pending = self._held + piece
        cut = min((at for text in self._stop if (at := pending.find(text)) >= 0), default=-1)
        if cut >= 0:
            self.is_stopped = True
            out, self._held = pending[:cut], ""
        else:
            keep = 0 if is_last else self._num_held(pending)
            out, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self._text += out
        return out

    def _num_held(self, pending: str) -> int:
        """Count the characters at the end that may be the start of a stop string."""
        longest = 0
        for text in self._stop:
            for length in range(min(len(text) - 1, len(pending)), longest, -1):
                if pending.endswith(text[:length]):
                    longest = length
                    break
        return longest
