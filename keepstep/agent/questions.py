"""What the controller may ask an agent for the sake of people: logs, evidence, checks. Nothing depends on it.

Each question has a name and an answerer, an asynchronous function from the question's arguments to bytes.
It does not know what the answers mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from keepstep.errors import KeepstepError
from keepstep.wire.framing import MAX_FRAME_BYTES
from keepstep.wire.messages import Answer, Ask

Answerer = Callable[[Mapping[str, Any]], Awaitable[bytes]]

ANSWER_TIMEOUT_S = 30.0
MAX_AT_ONCE = 16
MAX_ANSWER_BYTES = MAX_FRAME_BYTES // 2  # it travels as base64 in one frame

log = logging.getLogger(__name__)


class Questions:
    """The questions that one agent answers. Add answerers before the agent connects."""

    def __init__(self) -> None:
        self._answerers: dict[str, Answerer] = {}
        self._running = 0

    def add(self, what: str, answerer: Answerer) -> None:
        """Answer questions named `what`. An answerer raises KeepstepError or OSError with one line."""
        assert what not in self._answerers, f"{what} has an answerer already"
        self._answerers[what] = answerer

    async def answer(self, ask: Ask) -> Answer:
        """The answer, within ANSWER_TIMEOUT_S; a failure is an answer as well."""
        answerer = self._answerers.get(ask.what)
        if answerer is None:
            return Answer(request=ask.request, ok=False, detail=f"this agent cannot answer {ask.what!r}")
        if self._running >= MAX_AT_ONCE:
            return Answer(request=ask.request, ok=False, detail="this agent has too many questions at once")
        self._running += 1
        try:
            data = await asyncio.wait_for(answerer(ask.about), ANSWER_TIMEOUT_S)
        except TimeoutError:
            return Answer(request=ask.request, ok=False, detail=f"no answer in {ANSWER_TIMEOUT_S:g} s")
        except (KeepstepError, OSError, ValueError, KeyError, TypeError) as error:
            log.debug("no answer to %s", ask.what, exc_info=True)
            return Answer(request=ask.request, ok=False, detail=f"{type(error).__name__}: {error}")
        finally:
            self._running -= 1
        if len(data) > MAX_ANSWER_BYTES:
            detail = f"the answer has {len(data)} bytes, the limit is {MAX_ANSWER_BYTES}"
            return Answer(request=ask.request, ok=False, detail=detail)
        return Answer(request=ask.request, ok=True, data=data)
