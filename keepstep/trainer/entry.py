"""`keepstep.init` for the PyTorch that is installed: the protected one, or, where a piece is missing, none.

What the protected one imports may be missing itself, so that is decided before any of it is loaded.
"""

from __future__ import annotations

from typing import Any

from keepstep.trainer import torch_pieces


def load(name: str) -> Any:
    """`init` or `Run`."""
    missing = torch_pieces.missing()
    if missing:
        from keepstep.trainer import unprotected

        unprotected.REASON = torch_pieces.explain(missing)
        return getattr(unprotected, name)
    from keepstep.trainer import api

    return getattr(api, name)
