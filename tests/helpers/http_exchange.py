"""Requests to a server with its answers: recorded by a proxy, answered from the record without an engine."""

import asyncio
import json
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import aiohttp
from aiohttp import web

from verl.rollout.replica import ServerHandle

UNLIKE = ("rid", "serialized_named_tensors")  # parts of a request that differ from run to run


class Exchange:
    """An HTTP server that passes requests on to `target` and keeps them, or answers those of a record.

    A request is known by its path, its body, and how many like it came before. Its recorded answer is given when all
    requests that arrived while the real server worked on it have arrived again: an aborted request waits for its abort.

    Args:
        target: the real server; None to answer from `entries`.
        entries: the record.
    """

    def __init__(self, target: ServerHandle | None = None, entries: list[dict] | None = None) -> None:
        self.target, self.entries = target, entries or []
        self.arrived: list[int] = []  # numbers of entries, in order
        self._known = defaultdict(list)
        for number, entry in enumerate(self.entries):
            self._known[entry["path"], json.dumps(entry["body"])].append(number)
        self._changed: asyncio.Condition | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(60)
        self.handle = replace(target or ServerHandle("", "recorded"), address=f"127.0.0.1:{port}")

    async def _listen(self) -> int:
        self._changed = asyncio.Condition()
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self._runner.addresses[0][1]

    async def _answer(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        kept = {name: value for name, value in body.items() if name not in UNLIKE}
        if self.target is None:
            return await self._replay(request.path, kept)
        number, first = len(self.entries), len(self.arrived)
        self.arrived.append(number)
        self.entries.append({"path": request.path, "body": kept})
        headers = {"Authorization": request.headers.get("Authorization", ""), "Content-Type": "application/json"}
        async with aiohttp.ClientSession(trust_env=False) as session:
            url = f"http://{self.target.address}{request.path}"
            async with session.request(request.method, url, data=raw, headers=headers) as reply:
                answer = {"status": reply.status, "type": reply.content_type, "text": await reply.text()}
        self.entries[number] |= {"after": self.arrived[first + 1 :], **answer}
        return _response(answer)

    async def _replay(self, path: str, body: dict) -> web.Response:
        known = self._known[path, json.dumps(body)]
        if not known:
            return web.Response(status=501, text=f"not in the record: {path} {body}")
        entry = self.entries[number := known.pop(0)]
        async with self._changed:
            self.arrived.append(number)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: set(entry["after"]) <= set(self.arrived))
        return _response(entry)

    def save(self, file: Path) -> None:
        """Write the record."""
        file.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in self.entries) + "\n]\n")

    def close(self) -> None:
        """Stop listening."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)


def _response(answer: dict) -> web.Response:
    return web.Response(status=answer["status"], text=answer["text"], content_type=answer["type"])
