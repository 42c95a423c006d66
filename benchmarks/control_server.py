"""The real controller for control.py, in a process of its own: its ledger on the disk, its socket on the loopback."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from keepstep.controller.api import build_app
from keepstep.controller.ledger import Ledger
from keepstep.controller.server import Server, bind
from keepstep.controller.shell import Controller
from keepstep.core.job import JobMachine
from keepstep.core.job_config import JobConfig
from keepstep.wire.messages import JobSpec


async def serve(args: argparse.Namespace) -> int:
    ledger = Ledger(args.folder / "ledger.sqlite")
    config = JobConfig(world_size=args.ranks, spares=args.spares, job="control", refill_delay_s=0.5)
    spec = JobSpec(job="control", script="none.py", args=(), world_size=args.ranks, spares=args.spares)
    controller = Controller(
        machine=JobMachine(config),
        spec=spec,
        token=args.token,
        ledger=ledger,
        say=lambda text, level: print(f"{level}: {text[:300]}", file=sys.stderr, flush=True),
    )
    server = Server(build_app(controller), bind("127.0.0.1", 0))
    server.start()
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: controller.request_stop("SIGTERM", hard=True)
    )
    print(server.url, flush=True)
    try:
        return await controller.run()
    finally:
        await server.stop()
        ledger.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--token", required=True)  # of a throw-away job on the loopback
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--spares", type=int, required=True)
    sys.exit(asyncio.run(serve(parser.parse_args())))


if __name__ == "__main__":
    main()
