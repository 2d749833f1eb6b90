"""A plan that recomputes the front and sends the back gives the answer of a full prefill."""

from __future__ import annotations

from typing import Any

import pytest

from cloud_worker.executors import Executors
from codec import Codec
from edge_agent.model import EdgeModel
from engine import TorchEngine
from tests.edge_agent.test_uplink import TEXT, make_world


@pytest.fixture
def executors() -> Any:
    made = Executors()
    yield made
    made.close()


@pytest.mark.parametrize("policy", ["kvtide", "kvtide-fastest"])
async def test_text_from_the_front_and_levels_from_the_back_give_the_exact_answer(
    ingestor: Any, store: Any, metrics: Any, engine: TorchEngine, codec: Codec, pool: Any,
    executors: Executors, policy: str,
) -> None:  # fmt: skip
    async with make_world(ingestor, store, metrics, EdgeModel(engine, codec), pool) as world:
        exact = await ingestor.ingest(
            TEXT + "And once more in June.", context_id="exact", levels=["fp16"],
            on_progress=lambda _: None,
        )  # fmt: skip
        world.context = exact.context
        await world.add_worker(executors)
        # Nothing is known about the link, so the policy begins at both ends.
        end = await world.ask(world.request(policy, estimator="median-rate"))
        choices = [chunk.choice for chunk in end.timeline.chunks]
        assert choices[0] == "text"
        assert choices[-1] == "fp16"
        assert world.tokens == await world.expected()
        reasons = {decision["reason"] for decision in end.timeline.decisions}
        assert {"recompute_meanwhile", "default_level"} <= reasons
