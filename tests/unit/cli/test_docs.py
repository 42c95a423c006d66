"""Every option of every command stands in the command's page under docs/commands, by its long name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from keepstep.cli.main import COMMANDS, app

PAGES = Path(__file__).resolve().parents[3] / "docs" / "commands"


def options(command: Any) -> set[str]:
    """The long names, as the help shows them; of subcommands as well."""
    found = set()
    for parameter in command.params:
        names = [name for name in getattr(parameter, "opts", ()) if name.startswith("--")]
        if names and names[0] != "--help":
            found.add(names[0])
    for sub in getattr(command, "commands", {}).values():
        found |= options(sub)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(name: str) -> None:
    group: Any = get_command(app)
    command = group.get_command(None, name)
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    missing = sorted(option for option in options(command) if option not in page)
    assert not missing, f"docs/commands/{name}.md does not name {missing}"
