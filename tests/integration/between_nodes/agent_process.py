"""One node's agent as a process of its own. usage: agent_process.py SETTINGS (AgentConfig's fields as JSON)"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from keepstep.agent.agent import Agent
from keepstep.agent.config import AgentConfig

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    settings["run_dir"] = Path(settings["run_dir"])
    asyncio.run(Agent(AgentConfig(**settings)).run())
