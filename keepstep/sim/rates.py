"""How often what fails in a large training, as it was published (Llama 3, 16,384 GPUs, 54 days)."""

from __future__ import annotations

DAY_S = 86_400.0
# Interruptions a day and rank, and their causes: what each does to the job is the second column.
FAILURES_PER_RANK_DAY = 419 / 54 / 16_384
CAUSES: tuple[tuple[str, str, int], ...] = (
    ("GPU", "device", 148),
    ("HBM", "device", 72),
    ("software", "process", 54),
    ("network", "link", 35),
    ("maintenance", "node", 32),
    ("SRAM", "device", 19),
    ("GSP", "device", 17),
    ("NIC", "node", 7),
    ("watchdog", "hang", 7),
    ("silent corruption", "device", 6),
    ("thermal", "device", 6),
    ("others", "process", 16),
)
