"""Text to token ids and back, and chat prompts as text.

Wraps a Hugging Face fast tokenizer. Never adds special tokens by itself: a prompt is rendered to text,
special tokens included, and that text is tokenized.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer  # type: ignore[attr-defined, unused-ignore]

from engine.errors import TokenizerError


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(self, backend: Any) -> None:
        """Wrap a transformers tokenizer that is backed by the `tokenizers` library."""
        raw = getattr(backend, "backend_tokenizer", None)
        if raw is None:
            raise TokenizerError("the model's tokenizer has no tokenizer.json")
        self._backend = backend
        self._raw = RawTokenizer.from_str(raw.to_str())
        self._raw.no_truncation()
        self._raw.no_padding()
        # Two copies instead of one flag: `encode_special_tokens` is shared mutable state.
        self._literal = RawTokenizer.from_str(self._raw.to_str())
        self._literal.encode_special_tokens = True
        self._render_lock = threading.Lock()

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a model folder.

        Raises:
            TokenizerError: it is missing or unreadable.
        """
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise TokenizerError(f"no usable tokenizer in {folder}: {error}") from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """Number of distinct ids, added tokens included."""
        return int(self._raw.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence id."""
        value = self._backend.eos_token_id
        return None if value is None else int(value)

    @property
    def has_chat_template(self) -> bool:
        """True when the model ships a chat template."""
        return bool(getattr(self._backend, "chat_template", None))

    def encode(self, text: str, *, literal: bool = False) -> list[int]:
        """Tokenize text; no BOS or EOS is added.

        Args:
            text: any text.
            literal: True turns control tokens spelled out in the text, such as `<|im_end|>`, into plain
                text. Use it for documents: nobody's report may end the user's turn.
        """
        raw = self._literal if literal else self._raw
        return list(raw.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Turn token ids into text."""
        return str(self._raw.decode(list(token_ids), skip_special_tokens=skip_special))

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render chat messages with the model's template.

        Args:
            messages: each with `role` and `content`.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            TokenizerError: the template refuses the messages.
        """
        plain = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        if not self.has_chat_template:
            return self._render_plain(plain, add_generation_prompt)
        try:
            with self._render_lock:
                return str(
                    self._backend.apply_chat_template(
                        plain, tokenize=False, add_generation_prompt=add_generation_prompt
                    )
                )
        except Exception as error:  # jinja2 raises what the template's author chose
            raise TokenizerError(f"the chat template refuses these messages: {error}") from error

    def serialized(self) -> str:
        """Return the tokenizer as JSON text, for its digest."""
        return str(self._raw.to_str())

    def _render_plain(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        # A base model without a template: plain paragraphs, BOS as the tokenizer itself would add it.
        bos = ""
        if self._raw.num_special_tokens_to_add(is_pair=False) and self._backend.bos_token:
            bos = str(self._backend.bos_token)
        body = "".join(f"{m['content']}\n\n" for m in messages)
        return bos + (body if add_generation_prompt else body.rstrip("\n"))
