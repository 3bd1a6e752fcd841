"""HTTP servers on 127.0.0.1 whose answers a test writes as a function; requests to a server."""

import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import GeneratorType, SimpleNamespace
from typing import Any


@contextlib.contextmanager
def serving(answer: Callable[[SimpleNamespace], tuple[int, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """(URL, bodies of the requests so far) of a server for GET and POST.

    `answer(request) -> (status, value)`: `request` has path, headers and body (from JSON; None for GET). The value is
    sent as JSON; the pieces of a generator are sent as they are.
    """
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null"))
            self.reply(bodies[-1])

        def reply(self, body):
            status, value = answer(SimpleNamespace(path=self.path, headers=self.headers, body=body))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                for piece in value if isinstance(value, GeneratorType) else [json.dumps(value).encode()]:
                    self.wfile.write(piece)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def post(url: str, body: dict, timeout: float = 120) -> Any:
    """The JSON that a server answers to a body sent as JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.load(reply)


def get(url: str, timeout: float = 60) -> str:
    """The text that a server answers."""
    with urllib.request.urlopen(url, timeout=timeout) as reply:
        return reply.read().decode()
