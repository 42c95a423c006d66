"""An agent's side between nodes in a process of its own, for tests that stop or kill it. Prints its address.

usage: agent_of_another_node.py NODE HOST TOKEN [PORT]
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from keepstep.agent.announcements import Announcements
from keepstep.agent.config import AgentConfig
from keepstep.agent.peers import Peers
from keepstep.agent.store import GenerationStore
from keepstep.core.actions import Announce
from keepstep.core.types import Generation


async def serve(node: str, host: str, token: str, port: int) -> None:
    config = AgentConfig(
        controller_url="ws://127.0.0.1:1/agent",
        token=token,
        node=node,
        slots=1,
        run_dir=Path("/nowhere"),
        advertise=host,
        peer_port=port,
    )
    known = Announcements()
    known.accept(Announce(generation=Generation(number=0, ranks=(0, 1), fresh=True), reason="test"))
    peers = Peers(config, known, GenerationStore(), lambda worker: None, lambda: 0)
    await peers.open()
    print(peers.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it has gone
    await peers.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:4], int(sys.argv[4]) if len(sys.argv) > 4 else 0))
