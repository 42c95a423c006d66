"""Settings of run, controller and agent, resolved once: argument beats environment beats file beats default.

Every setting stands in one table with its check. A wrong value is one line that names where it came from.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keepstep.cli.addresses import Endpoint, parse_endpoint
from keepstep.errors import UsageError

DEFAULT_FILE = "keepstep.toml"
MAX_RANKS = 4096

Parse = Callable[[str], Any]


# ---- checks: text in, value out; ValueError says what was expected -----------------------------------


def whole(least: int, most: int = 1_000_000) -> Parse:
    """A whole number within bounds."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"must be a whole number, not {text!r}") from None
        if number < least:
            raise ValueError(f"must be {least} or more, not {number}")
        if number > most:
            raise ValueError(f"must be {most} or less, not {number}")
        return number

    return parse


def seconds(text: str) -> float:
    """A span of time in seconds, not negative."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"must be a number of seconds, not {text!r}") from None
    if not 0 <= number < 1e9:
        raise ValueError(f"must be 0 or more seconds, not {text}")
    return number


def one_of(*choices: str) -> Parse:
    """One of a few words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be {' or '.join(choices)}, not {text!r}")
        return text

    return parse


def size(text: str) -> int:
    """Bytes, with an optional KiB, MiB or GiB (K, M, G)."""
    units = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    digits = text.strip().lower().removesuffix("b").removesuffix("i").strip()
    unit = digits[-1:] if digits[-1:].isalpha() else ""
    number = digits.removesuffix(unit).strip()
    if unit not in units or not number.isdecimal():
        raise ValueError(f"must be a size such as 4MiB, not {text!r}")
    return int(number) * units[unit]


def record_size(text: str) -> int:
    """A record's limit: it must fit, as base64, into one message."""
    value = size(text)
    if not 4096 <= value <= 8 << 20:
        raise ValueError(f"must be between 4KiB and 8MiB, not {text}")
    return value


def ranks_per_node(text: str) -> int:
    """torchrun's --nproc-per-node: a number, cpu, gpu or auto."""
    if text in ("cpu", "gpu", "auto"):
        gpus = len([name for name in os.listdir("/dev") if name.removeprefix("nvidia").isdecimal()])
        if text == "gpu" and not gpus:
            raise ValueError("is gpu, but this machine shows no NVIDIA GPU")
        return gpus if gpus and text != "cpu" else len(os.sched_getaffinity(0))
    try:
        return int(whole(1, MAX_RANKS)(text))
    except ValueError as error:
        raise ValueError(f"{error} (or cpu, gpu, auto)" if "whole" in str(error) else str(error)) from None


def streams(text: str) -> str:
    """torchrun's -t and -r: 0..3 for all, or SLOT:STREAMS pairs such as 0:1,1:3."""
    parts = text.split(",")
    for part in parts:
        slot, colon, value = part.rpartition(":")
        if (
            value not in ("0", "1", "2", "3")
            or (colon and not slot.isdecimal())
            or (not colon and len(parts) > 1)
        ):
            raise ValueError(f"must be 0, 1, 2 or 3, or pairs such as 0:1,1:3, not {text!r}")
    return text


def nodes(text: str) -> int:
    """torchrun's --nnodes, as far as it is one number."""
    least, colon, most = text.partition(":")
    if colon and least.strip() != most.strip() and least.strip().isdecimal() and most.strip().isdecimal():
        raise ValueError(
            f"is {text}: give one number, since the world never shrinks or grows (a lost node is replaced by spares)"
        )
    return int(whole(1, MAX_RANKS)(least.strip() if colon else text))


def endpoint(text: str) -> Endpoint:
    """HOST:PORT; torchrun's port when there is none."""
    return parse_endpoint(text)


def labels(text: str) -> dict[str, str]:
    """rack=r1,zone=a: what placement goes by."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        plain = all(c.isascii() and (c.isalnum() or c in "-_.") for c in key + value)
        if not equals or not key or not value or not plain or max(len(key), len(value)) > 64:
            raise ValueError(f"must be KEY=VALUE pairs such as rack=r1,zone=a, not {part!r}")
        if found.setdefault(key, value) != value:
            raise ValueError(f"names {key} twice")
    return found


def node_name(text: str) -> str:
    """A node's name is also a file's name, hence as plain as a job's."""
    return job_name(text)


def yes_or_no(text: str) -> bool:
    """A switch in a file or a variable."""
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    if text.lower() not in words:
        raise ValueError(f"must be yes or no, not {text!r}")
    return words[text.lower()]


def job_name(text: str) -> str:
    """Part of file names under /dev/shm, hence plain and short."""
    if not text or len(text) > 64 or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in text):
        raise ValueError(f"must be 1 to 64 letters, digits, - _ or ., not {text!r}")
    if text.startswith("."):
        raise ValueError(f"must not begin with a dot: {text!r}")
    return text


def address(text: str) -> str:
    """An address or a name of this machine."""
    bare = text.strip().removeprefix("[").removesuffix("]")
    if not bare or any(c.isspace() or c in "/,[]" for c in bare):
        raise ValueError(f"must be an address of this machine, not {text!r}")
    return bare


def web_address(text: str) -> str:
    """Where messages are posted to."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in text):
        raise ValueError(f"must be an http:// or https:// address, not {text!r}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold a name or password: use --webhook-secret-file")
    return text


def folder(text: str) -> Path:
    """A path that is not empty."""
    if not text.strip():
        raise ValueError("must name a directory")
    return Path(text).expanduser()


# ---- the table ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """`name` is the flag without dashes, the file's key, and (upper case, KEEPSTEP_ before) the variable.

    `torchrun`: torchrun reads the same from a variable of its own (PET_ before), which is understood too.
    """

    name: str
    parse: Parse
    default: Any
    torchrun: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return f"KEEPSTEP_{self.key.upper()}"

    def from_environment(self, environ: Mapping[str, str]) -> tuple[str | None, str]:
        """Text and the variable that it stands in."""
        foreign = f"PET_{self.key.upper()}"
        if self.torchrun and self.variable not in environ and foreign in environ:
            return environ[foreign], foreign
        return environ.get(self.variable), self.variable


SETTINGS = (
    Setting("nproc-per-node", ranks_per_node, 1, torchrun=True),
    Setting("nnodes", nodes, 1, torchrun=True),
    Setting("node-rank", whole(0, MAX_RANKS), None, torchrun=True),
    Setting("rdzv-endpoint", endpoint, None, torchrun=True),
    Setting("bind", endpoint, None),
    Setting("advertise", address, None),
    Setting("labels", labels, {}),
    Setting("spare-node", yes_or_no, False),
    Setting("replace-unit", one_of("rank", "node"), "rank"),
    Setting("join-timeout", seconds, 600.0),
    Setting("isolation-timeout", seconds, 600.0),
    Setting("token-file", folder, None),
    Setting("tls-cert", folder, None),
    Setting("tls-key", folder, None),
    Setting("tls-ca", folder, None),
    Setting("spares", whole(0, MAX_RANKS), 0),
    Setting("slots", whole(1, 2 * MAX_RANKS), None),
    Setting("mode", one_of("run", "observe"), "run"),
    Setting("spare-timeout", seconds, 600.0),
    Setting("spare-check", seconds, 3600.0),
    Setting("max-restarts", whole(0), None),
    Setting("log-dir", folder, None),
    Setting("record-limit", record_size, 4 << 20),
    Setting("controller-port", whole(0, 65_535), 0),
    Setting("metrics-port", whole(1, 65_535), None),
    Setting("metrics-bind", address, "127.0.0.1"),
    Setting("policy", folder, None),
    Setting("open-metrics", yes_or_no, False),
    Setting("webhook", web_address, None),
    Setting("webhook-secret-file", folder, None),
    Setting("shutdown-timeout", seconds, 5.0),
    Setting("tee", streams, "0"),
    Setting("redirects", streams, "0"),
)


# Arguments only: agents set KEEPSTEP_JOB and KEEPSTEP_NODE for their workers, and a job started from
# within a worker must not take its names from there.
JOB = Setting("job", job_name, None)
NODE = Setting("node", node_name, None)
ARGUMENTS_ONLY = (JOB, NODE)


def resolve(
    arguments: Mapping[str, str | None],
    environ: Mapping[str, str],
    directory: Path,
    config: str | None = None,
) -> dict[str, Any]:
    """Every setting's value by key. Raises UsageError naming the source of the first wrong one."""
    file, from_file = _read_file(config or environ.get("KEEPSTEP_CONFIG"), directory)
    values: dict[str, Any] = {}
    for setting in (*SETTINGS, *ARGUMENTS_ONLY):
        text, source = arguments.get(setting.key), f"--{setting.name}"
        if text is None and setting not in ARGUMENTS_ONLY:
            text, source = setting.from_environment(environ)
            if text is None and setting.key in from_file:
                text, source = str(from_file[setting.key]), f"{file}: {setting.key}"
        if text is None:
            values[setting.key] = setting.default
            continue
        try:
            values[setting.key] = setting.parse(text)
        except ValueError as error:
            raise UsageError(f"{source} {error}") from None
    return values


def _read_file(named: str | None, directory: Path) -> tuple[Path, Mapping[str, Any]]:
    """The `[run]` table of keepstep.toml (or of the file that was named, which must then exist)."""
    path = Path(named) if named else directory / DEFAULT_FILE
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named:
            raise UsageError(f"there is no configuration file {path}") from None
        return path, {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    table = content.get("run", {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: run must be a table")
    known = {setting.key for setting in SETTINGS}
    given = {key.replace("-", "_"): value for key, value in table.items()}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise UsageError(f"{path}: unknown setting {unknown[0]} in [run]")
    return path, given
