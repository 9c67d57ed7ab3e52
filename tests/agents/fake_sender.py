"""A weight sender for the learner's process in tests: its backend is a file that says what it does next."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from rlenv.engine.base import Manifest, TensorDigest, WeightSyncClient
from rlenv.errors import ConfigError, EngineError


class FakeSender:
    def __init__(self, model: Any, *, backend: str, dtype: str, rank: int) -> None:
        self._model, self._orders, self._dtype = model, Path(backend), dtype

    def send(self, client: WeightSyncClient) -> Manifest:
        order = self._orders.read_text()
        if order == "raise":
            raise FloatingPointError("planted in the sender")
        if order == "refuse":
            raise ConfigError("no such backend")
        if order == "die":
            os._exit(7)
        if order == "spin":
            client.start_weight_update()
            while True:
                pass
        if order == "cores":
            return {",".join(map(str, sorted(os.sched_getaffinity(0)))): TensorDigest("", (), "")}
        if order == "leave a call behind":
            threading.Thread(target=client.update_weights, args=({},), daemon=True).start()
            time.sleep(0.2)
            raise EngineError("the engine did not come")
        if order == "peer":
            return {repr(client.peer): TensorDigest("", (), "")}
        return self._send_values(client, in_thread=order == "thread")

    def _send_values(self, client: WeightSyncClient, in_thread: bool) -> Manifest:
        weights = {name: parameter.detach().numpy() for name, parameter in self._model.named_parameters()}
        client.init_weight_transfer_engine({"dtype": self._dtype})
        client.start_weight_update()
        if in_thread:
            worker = threading.Thread(target=client.update_weights, args=(weights,))
            worker.start()
            worker.join()
        else:
            client.update_weights(weights)
        client.finish_weight_update()
        return {name: TensorDigest(str(value.dtype), value.shape, "") for name, value in weights.items()}
