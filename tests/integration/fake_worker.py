"""A worker without torch: speaks the wire, plays its rank by counting steps, and misbehaves on request.

usage: fake_worker.py --steps N [--step-s S] [--raise-at K] [--exit-at K:CODE] [--stubborn] [--child]
                      [--chatty] [--silent] [--refuse TEXT]
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from keepstep.core.actions import Announce, Release, StandBy
from keepstep.core.events import (
    Resumed,
    ScriptFailed,
    StateReceived,
    UsageRefused,
    VerdictReached,
    WorkerFinished,
    WorkerParked,
)
from keepstep.errors import WireError
from keepstep.wire import codec, framing
from keepstep.wire.messages import PROTOCOL_VERSION, Fenced, Hello, Welcome
from keepstep.wire.page import Page

WORKER = int(os.environ["KEEPSTEP_WORKER"])


class Player:
    """The connection to the agent, and the rank that is played."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.page = Page.open(os.environ["KEEPSTEP_PAGE"])
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["KEEPSTEP_SOCKET"])
        token = os.environ["KEEPSTEP_TOKEN"]
        self.say(Hello(version=PROTOCOL_VERSION, token=token, worker=WORKER, pid=os.getpid(), role="control"))
        assert isinstance(self.hear(), Welcome)
        self.rank: int | None = None
        self.step = 0

    def say(self, message: object) -> None:
        framing.send_frame(self.sock, codec.encode(message))

    def hear(self, timeout_s: float | None = None) -> Any:
        """The next message, or None when there is none in time. The agent's end is this process's too."""
        if timeout_s is not None and not select.select([self.sock], [], [], timeout_s)[0]:
            return None
        data = framing.recv_frame(self.sock)
        if data is None:
            raise SystemExit(9)
        return codec.decode(data)

    def take(self, message: Any) -> None:
        match message:
            case StandBy() if self.rank is None:
                self.say(WorkerParked(worker=WORKER, readiness="hot"))
            case Announce():
                self.join(message.generation)
            case Release():
                raise SystemExit(0)
            case Fenced():
                raise SystemExit(3)

    def join(self, generation: Any) -> None:
        newcomer, self.rank = self.rank is None, generation.rank_of(WORKER)
        if self.rank is None:
            if not newcomer:
                raise SystemExit(3)
            return
        number = generation.number
        common = {"worker": WORKER, "generation": number}
        course = "receive" if newcomer and not generation.fresh else "keep"
        if course == "receive":
            self.step = max(self.published_by_others(), 0)
        self.say(
            VerdictReached(
                **common, target=self.step, course=course, reason="told so", connect_s=0.001, vote_s=0.002
            )
        )
        if course == "receive":
            self.say(StateReceived(**common, transfer_s=0.003, bytes=1_000_000, sources=(0,)))
        self.say(Resumed(**common, step=self.step + 1))
        self.page.generation = number

    def published_by_others(self) -> int:
        """What a twin would send: the newest step of any page beside this worker's own."""
        folder = os.path.dirname(os.environ["KEEPSTEP_PAGE"])
        steps = []
        for name in os.listdir(folder):
            try:
                steps.append(Page.open(os.path.join(folder, name)).published)
            except (OSError, WireError):
                pass  # not a page, or removed meanwhile
        return max(steps, default=0)

    def play(self) -> None:
        if self.options.refuse:
            self.say(UsageRefused(worker=WORKER, message=self.options.refuse))
        self.say(WorkerParked(worker=WORKER, readiness="warm"))
        while self.rank is None:
            self.take(self.hear())
        print(f"playing rank {self.rank}", flush=True)
        while self.step < self.options.steps:
            self.take(self.hear(self.options.step_s))
            self.step += 1
            self.page.step = self.step
            self.page.published = self.step
            self.misbehave()
        self.say(WorkerFinished(worker=WORKER, step=self.step))
        while self.hear(0.5) is not None:
            pass

    def misbehave(self) -> None:
        if self.options.chatty:
            sys.stdout.write("".join(f"line {n} of step {self.step}\n" for n in range(2000)))
        if self.rank == 1 and self.step == self.options.raise_at:
            trace = "Traceback (most recent call last):\n  the user's line\nValueError: of the user"
            self.say(ScriptFailed(worker=WORKER, summary="ValueError: of the user", traceback=trace))
            raise SystemExit(17)
        at, _, code = (self.options.exit_at or "-1:0").partition(":")
        if self.rank == 1 and self.step == int(at):
            os._exit(int(code))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--exit-at")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--chatty", action="store_true")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--refuse")
    options = parser.parse_args()
    if options.silent:
        raise SystemExit(0)
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Player(options).play()


if __name__ == "__main__":
    begun = time.monotonic()
    main()
