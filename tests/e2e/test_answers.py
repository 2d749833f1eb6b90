"""Answers over the whole path: agent, broker and worker as processes, SmolLM2 as the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine import Sampling, TorchEngine
from engine.prompt import Message, context_token_ids, question_token_ids
from tests.e2e.processes import Client, Program

pytestmark = pytest.mark.e2e

QUESTION = "Who inspected the boiler in hall four, and what was replaced?"
MAX_TOKENS = 24


def options(policy: str, **fields: Any) -> dict[str, Any]:
    return {"context_id": "doc", "policy": policy, "deadline_s": 30.0, **fields}


@pytest.fixture(scope="module")
def exact_answer(smollm2: TorchEngine, context_text: str) -> str:
    """The answer of the same tokens without any transport."""
    ids = context_token_ids(smollm2.tokenizer, context_text)
    ids += question_token_ids(smollm2.tokenizer, [Message("user", QUESTION)])
    cache = smollm2.new_cache(len(ids) + MAX_TOKENS)
    logits = smollm2.prefill(cache, ids)
    answer = list(smollm2.generate(cache, logits, len(ids), Sampling(), MAX_TOKENS))
    return smollm2.tokenizer.decode(answer)


@pytest.mark.parametrize("policy", ["fixed:fp16", "text"])
def test_answer_equals_the_one_without_transport(
    client: Client, exact_answer: str, policy: str
) -> None:
    reply = client.ask(QUESTION, max_tokens=MAX_TOKENS, kvtide=options(policy))
    assert reply.status == 200, (reply.body, client.program.tail())
    assert reply.text == exact_answer
    report = reply.body["kvtide"]
    assert [chunk["choice"] for chunk in report["chunks"]] == [policy.removeprefix("fixed:")] * len(
        report["chunks"]
    )
    assert (report["bytes_sent"] == 0) == (policy == "text")


def test_stream_gives_the_same_text_and_the_same_report(client: Client, exact_answer: str) -> None:
    events = list(client.stream(QUESTION, max_tokens=MAX_TOKENS, kvtide=options("fixed:fp16")))
    assert events[-1] == "[DONE]"
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert text == exact_answer
    report = events[-2]["kvtide"]
    assert report["policy"] == "fixed:fp16"
    assert 0 < report["ttft_s"] <= report["last_token_s"]
    for chunk in report["chunks"]:
        # The worker may have decoded a chunk before the last acknowledgement is here.
        assert chunk["send_start_s"] < chunk["acked_s"], chunk
        assert chunk["send_start_s"] < chunk["ready_s"], chunk
        assert chunk["decode_start_s"] <= chunk["decode_end_s"]
    assert report["prefill_start_s"] <= report["prefill_end_s"]


def test_evaluation_compares_with_the_exact_cache(client: Client, exact_answer: str) -> None:
    reply = client.ask(QUESTION, max_tokens=MAX_TOKENS, kvtide=options("fixed:fp16", evaluate=True))
    evaluation = reply.body["kvtide"]["evaluation"]
    assert evaluation["exact_text"] == exact_answer
    assert evaluation["greedy_match"] == 1.0
    assert 0.0 <= evaluation["kl"] < 1e-3
    assert evaluation["top1"] == 1.0


def test_unknown_context_is_404(client: Client) -> None:
    reply = client.ask(QUESTION, kvtide={"context_id": "nope"})
    assert reply.status == 404
    assert "'nope'" in reply.body["error"]["message"]


def test_plain_chat_without_context_works(client: Client) -> None:
    reply = client.ask("Say hello.", max_tokens=4)
    assert reply.status == 200, (reply.body, client.program.tail())
    assert reply.text


def test_without_a_worker_the_answer_is_503_within_two_seconds(
    client: Client, start_agent: Callable[..., Program], context_text: str
) -> None:
    # A tenant that nobody serves, on the same broker.
    lonely = Client(start_agent(tenant="lonely", levels="fp16").wait_ready())
    lonely.ingest("doc", context_text[:300])
    started = time.monotonic()
    reply = lonely.ask(QUESTION, kvtide=options("text"))
    assert time.monotonic() - started < 2.5
    assert reply.status == 503
    assert reply.body["error"]["code"] == "no_worker"
    assert "lonely" in reply.body["error"]["message"]
    assert reply.headers["retry-after"]
    assert lonely.program.stop() == 0


def test_worker_killed_in_mid_stream_and_restarted_serves_the_next_request(
    client: Client, worker: Program, exact_answer: str
) -> None:
    stream = client.stream(QUESTION, max_tokens=200, kvtide=options("fixed:fp16"))
    while "content" not in next(stream)["choices"][0]["delta"]:
        pass
    worker.kill()
    rest = list(stream)
    # The answer was cut: the client is told so, and gets no [DONE].
    assert rest[-1]["error"]["code"] == "worker_lost", rest[-1]
    worker.start().wait_ready()
    reply = client.ask(QUESTION, max_tokens=MAX_TOKENS, kvtide=options("fixed:fp16"))
    assert reply.status == 200, (reply.body, client.program.tail())
    assert reply.text == exact_answer


def test_sigterm_finishes_the_running_answer_and_exits_with_0(client: Client) -> None:
    """Last in this module: it ends the agent that the others use."""
    program = client.program
    stream = client.stream(QUESTION, max_tokens=MAX_TOKENS, kvtide=options("fixed:fp16"))
    next(stream)
    codes: list[int] = []
    stopper = threading.Thread(target=lambda: codes.append(program.stop()))
    stopper.start()
    events = list(stream)
    stopper.join()
    assert events[-1] == "[DONE]"
    assert codes == [0]
    printed = "\n".join(program.lines)
    assert "boiler" not in printed, "a prompt was logged"
