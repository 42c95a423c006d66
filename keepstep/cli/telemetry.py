"""What a job tells the outside of itself: metrics without a token, and messages about incidents."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from keepstep.agent.metrics_listener import MetricsAddress
from keepstep.cli.tokens import check_token, read_token_file
from keepstep.errors import UsageError

SECRET_VARIABLE = "KEEPSTEP_WEBHOOK_SECRET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """`webhook`: where incidents are told, `secret` signs the messages. `open_metrics`: no token from loopback."""

    webhook: str | None = None
    secret: str | None = None
    open_metrics: bool = False

    def __repr__(self) -> str:
        secret = "given" if self.secret else None
        return f"Telemetry(webhook={self.webhook}, secret={secret}, open_metrics={self.open_metrics})"


def choose_telemetry(settings: Mapping[str, Any], environ: MutableMapping[str, str]) -> Telemetry:
    """Read and check them. Takes the secret's variable away, so that no process started later shows it.

    Raises UsageError.
    """
    direct = environ.pop(SECRET_VARIABLE, None)
    path = settings["webhook_secret_file"]
    if direct is not None and path is not None:
        raise UsageError(
            f"{SECRET_VARIABLE} and --webhook-secret-file are both given: one of them says the secret"
        )
    if (direct is not None or path is not None) and settings["webhook"] is None:
        raise UsageError("a secret for the webhook, but no webhook: --webhook URL")
    secret = check_token(direct, SECRET_VARIABLE) if direct is not None else None
    if path is not None:
        secret = read_token_file(path)
    return Telemetry(webhook=settings["webhook"], secret=secret, open_metrics=settings["open_metrics"])


def choose_metrics(settings: Mapping[str, Any]) -> MetricsAddress | None:
    """Where this node's agent answers Prometheus; None: nowhere."""
    if settings["metrics_port"] is None:
        return None
    return MetricsAddress(
        port=settings["metrics_port"], host=settings["metrics_bind"], open=settings["open_metrics"]
    )
