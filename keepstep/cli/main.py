"""The `keepstep` command: finds the file of the command asked for, turns errors into one line and a code.

Each command is a file of this folder that offers a function of the file's name (or, with subcommands, a
typer.Typer called `app`) and imports what is heavy inside its functions. Nothing here, nor in any of them, imports torch before a command runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command as build_command

from keepstep import __version__
from keepstep.errors import InvariantError, KeepstepError, UsageError

COMMANDS = (
    "run",
    "controller",
    "agent",
    "status",
    "incidents",
    "logs",
    "replicas",
    "migrate",
    "drain",
    "undrain",
    "policy",
    "doctor",
    "prove",
    "demo",
)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_BROKEN = 70  # sysexits.h: an internal software error
EXIT_INTERRUPTED = 130


_STYLE: Any = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}


class _LazyGroup(TyperGroup):
    """Loads a command's file when that command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if importlib.util.find_spec(f"keepstep.cli.{name}") is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"keepstep.cli.{cmd_name}")
        if hasattr(module, "app"):
            command = build_command(module.app)
        else:
            single = typer.Typer(**_STYLE)
            single.command(**getattr(module, "COMMAND", {}))(getattr(module, cmd_name))
            command = build_command(single)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_LazyGroup,
    **_STYLE,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"keepstep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
    ),
) -> None:
    """Keep a distributed PyTorch job running through hardware failures."""


def main() -> NoReturn:
    """The entry point: run the command of sys.argv and exit with its code."""
    raise SystemExit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command. Returns the exit code: 2 for bad input, always with one line that says what to do."""
    try:
        code = build_command(app).main(
            args=list(arguments) or ["--help"], prog_name="keepstep", standalone_mode=False
        )
        return code if isinstance(code, int) else 0
    except UsageError as error:
        return _fail(str(error), EXIT_USAGE)
    except InvariantError as error:
        return _fail(f"this is a bug of Keepstep, please report it: {error}", EXIT_BROKEN)
    except KeepstepError as error:
        return _fail(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        # typer's own complaints (unknown flag, missing value) share only this method.
        if not hasattr(error, "format_message"):
            raise
        return _fail(" ".join(str(error.format_message()).split()), EXIT_USAGE)


def _fail(message: str, code: int) -> int:
    print(f"keepstep: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
