"""What a worker finds of itself: a device that computes, one that does not, and memory."""

from __future__ import annotations

import pytest
import torch

from keepstep.trainer import spare_check


def test_a_healthy_device_computes_what_is_known_and_memory_is_told() -> None:
    before = torch.random.get_rng_state()
    finding = spare_check.look(torch.device("cpu"))
    assert finding.trouble == ""
    assert finding.free_bytes > 1 << 20
    assert torch.equal(before, torch.random.get_rng_state()), "a check draws no random numbers"


def test_a_device_that_cannot_compute_is_a_finding_and_no_exception() -> None:
    finding = spare_check.look(torch.device("meta"))
    assert "NotImplementedError" in finding.trouble
    assert "\n" not in finding.trouble


def test_a_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_check, "KNOWN_SUM", 1)
    assert "computes wrongly" in spare_check.look(torch.device("cpu")).trouble
