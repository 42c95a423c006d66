"""Inner NCCL groups, with the same face as `keepstep.trainer.gloo`. UNTESTED: no GPU was at hand.

docs/gpu.md says what this rests on: abort() frees spinning kernels, so collectives on the
GPU end with rubbish; a blocking initialisation cannot be aborted, hence nonblocking with a short
timeout. Tensors on the CPU go through a gloo group made beside it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from keepstep.trainer.gloo import BACKEND, OPERATION_TIMEOUT, GlooFabric

# Without these the NCCL watchdog ends the process of a survivor (set before the first group is made).
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "NCCL_NVLS_ENABLE": "0",
}


class NcclFabric(GlooFabric):
    """Gloo for CPU tensors and NCCL for CUDA tensors, both of one generation."""

    def __init__(self, hostname: str, device: torch.device) -> None:
        super().__init__(hostname)
        self._cuda = device
        self._backends: list[Any] = []

    def connect(self, store: dist.Store, rank: int, size: int, connect_timeout_s: float) -> dist.ProcessGroup:
        """A connected inner group with both backends."""
        group = super().connect(store, rank, size, connect_timeout_s)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = OPERATION_TIMEOUT
        options.config.blocking = 0
        backend = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        backend._set_default_timeout(timedelta(seconds=connect_timeout_s))
        group._register_backend(self._cuda, BACKEND.NCCL, backend)
        self._backends.append(backend)
        return group

    def cut(self) -> int:
        """Abort every NCCL communicator, then shut the gloo connections."""
        backends, self._backends = self._backends, []
        for backend in backends:
            backend.abort()
        return super().cut() + len(backends)
