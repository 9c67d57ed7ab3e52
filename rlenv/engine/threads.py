"""A blocking call goes in, an awaitable comes out, on a thread that holds up nobody else and not the exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Await a call on a daemon thread of its own; the interpreter waits for the threads of a pool, even if they hang.

    Cancelling the await leaves the call running.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
