"""A made-up vLLM server: the routes that `ServerEngine` calls, answered from a few fields that a test may change."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from rlenv.engine.base import Manifest, TensorDigest, WeightSyncClient
from rlenv.models import default_model

DIGEST = ["float32", [2], "0"]
TOKENS = [65, 66, 67]


class FakeServer:
    """Answers on loopback until `kill`. `hangs` are routes that never answer, `fails` those with a status instead."""

    def __init__(self, *, token: str | None = None) -> None:
        self.token = token
        self.label, self.paused = "default", False
        self.setup: dict[str, Any] = {"dtype": "float32", "transport": "shm", "vocabulary": 200, "block": 16}
        self.setup["logprobs_mode"] = "processed_logprobs"
        self.calls: Counter[str] = Counter()
        self.hangs: set[str] = set()
        self.fails: dict[str, tuple[int, str]] = {}
        self.breaks: Counter[str] = Counter()  # route → how many of its next calls end without an answer
        self.slow: dict[str, float] = {}  # route → seconds between what it does and its answer
        self.late: dict[str, float] = {}  # route → seconds that a call of it is on its way
        self.dies_at = ""
        self.logprob = -1.0
        self._released = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def restart(self) -> None:
        """What a client sees of a server that was started anew: no label, no pause, nothing in flight."""
        self.label, self.paused = "default", False
        self.hangs.clear()

    def kill(self) -> None:
        """From now on nobody answers, and who waits is cut off."""
        self._released.set()
        self._http.shutdown()
        self._http.server_close()

    def wait(self) -> bool:
        """Hang; returns once the server was killed."""
        return self._released.wait(30)

    def answer(self, route: str, body: Any) -> Any:
        """The JSON of one call."""
        if route == "/v1/models":
            return {"data": [{"root": default_model(), "max_model_len": 256}]}
        if route == "/collective_rpc":
            rows = {"checkpoint": [["weight", "weight", *DIGEST]], "constant": []}
            return {"results": [{"rlenv_settings": self.setup, "rlenv_weights": rows}.get(body["method"])]}
        if route == "/update_weight_version":
            self.label = body["new_version"]
        if route in ("/pause", "/resume"):
            self.paused = route == "/pause"
        if route == "/inference/v1/generate":
            while self.paused and not self._released.is_set():
                time.sleep(0.01)
            return self._generated(body)
        return {"weight_version": self.label, "is_paused": self.paused}

    def _generated(self, body: Any) -> Any:
        count = min(body["sampling_params"]["max_tokens"], len(TOKENS))
        span = {"version": self.label, "start": 0, "end": count}
        rows = [None, *({str(i): {"logprob": self.logprob}} for i in body["token_ids"][1:])]
        content = [{"token_id": i, "logprob": self.logprob} for i in TOKENS[:count]]
        return {
            "choices": [{"token_ids": TOKENS[:count], "logprobs": {"content": content}, "weight_versions": [span],
                         "finish_reason": "length"}],
            "prompt_logprobs": rows if "prompt_logprobs" in body["sampling_params"] else None,
        }  # fmt: skip


class FakeSender:
    """Sends the one tensor that the made-up server has."""

    def send(self, client: WeightSyncClient) -> Manifest:
        client.start_weight_update()
        client.update_weights({"names": ["weight"], "shapes": [[2]]})
        client.finish_weight_update()
        return {"weight": TensorDigest("float32", (2,), "0")}

    def logprobs(self, sequences: Any) -> list[list[float]]:
        return [[-1.0] * (len(sequence) - 1) for sequence in sequences]


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            route = urlsplit(self.path).path
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            server.calls[route] += 1
            if route == server.dies_at:
                threading.Thread(target=server.kill).start()
            if route in server.hangs or "*" in server.hangs or route == server.dies_at:
                server.wait()
                self.close_connection = True
                return
            if server.breaks[route] > 0:
                server.breaks[route] -= 1
                self.close_connection = True
                return
            guarded = route.startswith(("/v1", "/inference")) and server.token is not None
            if guarded and self.headers.get("Authorization") != f"Bearer {server.token}":
                self._send(401, {"error": "Unauthorized"})
            elif route in server.fails:
                status, message = server.fails[route]
                self._send(status, {"error": {"message": message}})
            else:
                time.sleep(server.late.get(route, 0.0))
                answer = server.answer(route, body)
                time.sleep(server.slow.get(route, 0.0))
                self._send(200, answer)

        do_POST = do_GET

        def _send(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is printed."""

    return Handler


def soon(condition: Any, seconds: float = 5.0) -> bool:
    """Whether `condition()` comes true within that time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())
