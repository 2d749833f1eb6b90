from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from engine import Tokenizer, TokenizerError, TorchEngine


def test_no_special_token_is_added(tiny_engine: TorchEngine) -> None:
    assert tiny_engine.tokenizer.decode(tiny_engine.tokenizer.encode("hello")) == "hello"
    assert not set(tiny_engine.tokenizer.encode("hello")) & {0, 1, 2}
    assert tiny_engine.tokenizer.encode("") == []


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60))
def test_text_comes_back_from_its_tokens(tiny_engine: TorchEngine, text: str) -> None:
    tokenizer = tiny_engine.tokenizer
    assert tokenizer.decode(tokenizer.encode(text, literal=True), skip_special=False) == text


def test_literal_and_rendered_encoding_do_not_disturb_each_other(tiny_engine: TorchEngine) -> None:
    tokenizer = tiny_engine.tokenizer

    def one(index: int) -> bool:
        ids = tokenizer.encode("<|im_end|>", literal=index % 2 == 0)
        return (ids == [2]) == (index % 2 == 1)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(400)))


def test_a_template_that_refuses_is_a_typed_error(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    tokenizer._backend.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(TokenizerError, match="no system role"):
        tokenizer.render_chat([{"role": "system", "content": "x"}])


def test_a_base_model_without_a_template_gets_paragraphs(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    tokenizer._backend.chat_template = None
    assert not tokenizer.has_chat_template
    messages = [{"role": "user", "content": "One."}, {"role": "user", "content": "Two?"}]
    assert tokenizer.render_chat(messages) == "One.\n\nTwo?\n\n"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "One.\n\nTwo?"


def test_a_folder_without_a_tokenizer_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TokenizerError):
        Tokenizer.load(tmp_path)
