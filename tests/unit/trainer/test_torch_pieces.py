"""The list of PyTorch's private pieces: all there, complete, and cheap to look at."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from keepstep.trainer import torch_pieces

TRAINER = Path(torch_pieces.__file__).parent


def test_nothing_is_missing_in_the_supported_pytorch_and_looking_costs_little() -> None:
    torch_pieces.missing()
    started_s = time.process_time()
    assert torch_pieces.missing() == []
    assert time.process_time() - started_s < 0.05


def test_every_private_module_that_the_trainer_imports_stands_in_the_list() -> None:
    listed = " ".join(torch_pieces.PIECES)
    for path in TRAINER.rglob("*.py"):
        for module in re.findall(
            r"^\s*from (torch[\w.]*\._\w+[\w.]*) import", path.read_text(), re.MULTILINE
        ):
            assert module in listed, f"{path.name} imports {module}: name it in torch_pieces.PIECES"


def test_a_missing_piece_and_a_changed_signature_are_both_found() -> None:
    code = """
import torch, torch.distributed.fsdp, torch.distributed.tensor
from keepstep.trainer import torch_pieces
torch_pieces.missing()
del torch.nn.parallel.DistributedDataParallel._update_process_group
torch.distributed.Backend.register_backend = classmethod(lambda cls, name, func: None)
found = torch_pieces.missing()
for piece in found:
    print(piece.name, piece.detail)
print(torch_pieces.explain(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0].endswith("DistributedDataParallel._update_process_group is missing")
    assert lines[1].endswith("Backend.register_backend takes no extended_api, devices")
    assert "and 1 more; something changed this PyTorch" in lines[2]
