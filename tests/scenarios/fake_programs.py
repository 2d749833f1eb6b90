"""Stand-ins for the agent and the worker, run as processes: the API's shape, bytes over real NATS, no model.

`python fake_programs.py agent|worker [MODE] --config FILE`. The agent pushes a policy's bytes to the broker with
PUB and takes the PONG behind them as the first token.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

CHUNK_BYTES = {"text": 0, "fp16": 200_000, "int8": 100_000, "cachegen:2": 40_000}
NUM_CHUNKS = 2
Settings = dict[str, Any]


async def push(settings: Settings, num_bytes: int) -> None:
    """Send so many bytes to the broker and wait until it has them."""
    url = urlsplit(settings["nats_url"])
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    await reader.readline()  # INFO
    hello = json.dumps({"verbose": False, "auth_token": settings["token"]})
    writer.write(f"CONNECT {hello}\r\n".encode())
    if num_bytes:
        writer.write(f"PUB data {num_bytes}\r\n".encode() + bytes(num_bytes) + b"\r\n")
    writer.write(b"PING\r\n")
    while True:
        line = await reader.readline()
        if line.startswith(b"PONG"):
            break
        if not line or line.startswith(b"-ERR"):
            raise ConnectionError(line.decode())
    writer.close()


def level_of(policy: str) -> str:
    rule, _, level = policy.partition(":")
    return level if rule == "fixed" else {"cachegen": "cachegen:2"}.get(rule, rule)


class Agent:
    def __init__(self, settings: Settings, mode: str) -> None:
        self.settings = settings
        self.mode = mode

    async def contexts(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.mode == "refuse-ingest":
            return web.json_response({"error": {"message": "the disk is full"}}, status=507)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for stage in ("tokenize", "prefill", "encode"):
            for done in (1, 2):
                event = json.dumps({"stage": stage, "done": done, "total": 2})
                await response.write(f"event: progress\ndata: {event}\n\n".encode())
        done_event = {
            "id": body["id"],
            "num_tokens": len(body["text"]) // 4,
            "num_chunks": NUM_CHUNKS,
            "bytes_by_level": {level: n * NUM_CHUNKS for level, n in CHUNK_BYTES.items() if n},
            "duration_s": 0.01,
        }
        await response.write(f"event: done\ndata: {json.dumps(done_event)}\n\n".encode())
        return response

    async def chat(self, request: web.Request) -> web.StreamResponse:
        began = time.monotonic()
        body = await request.json()
        extra = body["kvtide"]
        if self.mode == "no-worker":
            problem = {"error": {"message": "no worker answered within 2 s"}}
            return web.json_response(problem, status=503)
        if self.mode == "die":
            os._exit(3)
        level = level_of(extra["policy"])
        size = CHUNK_BYTES[level]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        chunks: list[dict[str, Any]] = []
        for index in range(NUM_CHUNKS):
            start_s = time.monotonic() - began
            await push(self.settings, size)
            acked_s = time.monotonic() - began
            chunks.append(
                {
                    "index": index,
                    "token_start": index * 10,
                    "token_stop": index * 10 + 10,
                    "choice": level,
                    "bytes": size,
                    "epoch": 0,
                    "send_start_s": start_s,
                    "acked_s": acked_s,
                    "decode_start_s": acked_s,
                    "decode_end_s": acked_s,
                    "ready_s": acked_s,
                }
            )
        first_s = time.monotonic() - began
        await response.prepare(request)
        for piece in ("It ", "works."):
            data = {"choices": [{"index": 0, "delta": {"content": piece}}]}
            await response.write(f"data: {json.dumps(data)}\n\n".encode())
        kvtide: dict[str, Any] = {
            "session": "s",
            "worker": "worker-0",
            "policy": extra["policy"],
            "deadline_s": extra["deadline_s"],
            "ttft_s": first_s,
            "bytes_sent": size * NUM_CHUNKS,
            "chunks": chunks,
            "prefill_start_s": first_s,
            "prefill_end_s": first_s,
            "first_token_s": first_s,
            "last_token_s": first_s,
            "delivery": [[0.1, 1e6]],
            "decisions": [],
            "evaluation": {
                "kl": 0.0 if level != "cachegen:2" else 0.02,
                "top1": 1.0,
                "greedy_match": True,
                "exact_text": "It works.",
            },
        }
        if self.mode == "garble":
            del kvtide["chunks"][0]["choice"]
        last = {"choices": [{"index": 0, "delta": {}}], "kvtide": kvtide}
        await response.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
        return response


async def serve(kind: str, mode: str, settings: Settings) -> None:
    app = web.Application(client_max_size=2**24)
    ready = {"status": "ready", "engine": True, "broker": True, "draining": False}
    ready_status = 503 if mode == "never-ready" else 200

    async def readyz(_: web.Request) -> web.Response:
        return web.json_response(ready, status=ready_status)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="# HELP x\nkvtide_worker_active_sessions 1.0\n")

    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    if kind == "agent":
        agent = Agent(settings, mode)
        app.router.add_post("/v1/contexts", agent.contexts)
        app.router.add_post("/v1/chat/completions", agent.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", settings["http_port"])
    await site.start()
    port = runner.addresses[0][1]
    sys.stdout.write(json.dumps({"event": "starting"}) + "\n")
    sys.stdout.write(json.dumps({"event": "listening", "port": port}) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    kind, mode = sys.argv[1], sys.argv[2]
    settings = tomllib.loads(Path(sys.argv[4]).read_text(encoding="utf-8"))
    if "nats_token_file" in settings:
        path = Path(settings["nats_token_file"])
        settings["token"] = path.read_text(encoding="utf-8").strip()
    if mode == "exit":
        sys.stdout.write(json.dumps({"event": "failed", "error": "the port is busy"}) + "\n")
        sys.exit(2)
    if mode == "stubborn":
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(serve(kind, mode, settings))


if __name__ == "__main__":
    main()
