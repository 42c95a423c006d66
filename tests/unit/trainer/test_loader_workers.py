"""Loader workers repeat their augmentation, and one that dies is replaced without a trace."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.utils.data import (
    DataLoader,
)

from keepstep.trainer.adapters.loader_workers import LoaderWorkerDeath, take_over_sigchld
from keepstep.trainer.data import Cursor, clone
from tests.unit.trainer.loaders import (
    LOADERS,
    Augmented,
    plain_run,
    records,
    resumed,
    run_to_end,
    same,
    seed,
    step,
)


@pytest.mark.parametrize("persistent", [False, True], ids=["ending workers", "persistent workers"])
@pytest.mark.parametrize("name", ["shuffle", "distributed", "eager", "no batches", "shuffle own generator"])
def test_loader_workers_repeat_augmentation_at_every_batch(name, persistent):
    def make():
        return LOADERS[name](num_workers=2, persistent_workers=persistent)

    epochs = 3 if persistent else 2
    seed()
    cursor = Cursor(make(), epochs)
    kept, expected = records(cursor)
    cursor.close()
    positions = range(len(kept)) if len(kept) < 20 else range(0, len(kept), 5)
    for position in positions:
        assert same(resumed(make, epochs, kept[position]), expected[position:]), position


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_workers_serve_the_samples_of_the_plain_loop_in_its_order(persistent):
    for name in ("shuffle", "eager", "distributed"):
        seed()
        expected = plain_run(LOADERS[name](num_workers=2, persistent_workers=persistent), 2)
        seed()
        cursor = Cursor(LOADERS[name](num_workers=2, persistent_workers=persistent), 2)
        got = run_to_end(cursor)
        cursor.close()
        assert [a[:, 0].tolist() for a, _ in got] == [a[:, 0].tolist() for a, _ in expected], name


class Slow(Augmented):
    def __getitem__(self, index):
        time.sleep(0.02)
        return super().__getitem__(index)


class Deadly(Augmented):
    def __getitem__(self, index):
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("persistent", [False, True], ids=["ending workers", "persistent workers"])
def test_killed_loader_worker_is_replaced_and_no_batch_differs(persistent):
    def make():
        return DataLoader(Slow(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=persistent)

    seed()
    cursor = Cursor(make(), 2)
    _, expected = records(cursor)
    cursor.close()
    for at in (0, 2, 6, 7):
        deaths = []
        seed()
        cursor = Cursor(make(), 2, on_worker_death=deaths.append)
        got = []
        while True:
            if cursor.batches_served == at and not deaths and cursor._iterator is not None:
                os.kill(cursor._iterator._workers[0].pid, signal.SIGKILL)
                at_s = time.monotonic()
                while cursor._iterator._workers[0].is_alive() and time.monotonic() < at_s + 5:
                    time.sleep(0.001)  # a busy main thread: nothing may be raised here
            try:
                batch = cursor.next_batch()
            except StopIteration:
                break
            if got == [] and at == 0:
                os.kill(cursor._iterator._workers[1].pid, signal.SIGKILL)
            got.append((clone(batch), step(batch)))
        cursor.close()
        assert len(deaths) == 1 and "exited unexpectedly" in deaths[0], (at, deaths)
        assert same(got, expected), at


def test_sample_that_kills_its_worker_is_tried_three_times_then_told_and_at_once():
    cursor = Cursor(DataLoader(Deadly(), batch_size=4, num_workers=1), 1)
    deaths = []
    cursor._on_worker_death = deaths.append
    served = [cursor.next_batch()[:, 0].tolist(), cursor.next_batch()[:, 0].tolist()]
    assert served == [[0, 1, 2, 3], [4, 5, 6, 7]]  # sample 9 kills whoever loads it, and only batch 2 suffers
    start_s = time.monotonic()
    with pytest.raises(LoaderWorkerDeath, match="exited unexpectedly"):
        cursor.next_batch()
    assert sum("from batch 2 on" in text for text in deaths) == 3
    assert time.monotonic() - start_s < 4.5  # PyTorch's own poll alone would take 5 s for each


def test_death_of_a_worker_raises_nothing_in_the_users_code_even_after_a_plain_loader_ran():
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    torch.utils.data._utils.signal_handling._SIGCHLD_handler_set = False
    calls = []
    signal.signal(signal.SIGCHLD, lambda *_: calls.append(1))
    for _ in DataLoader(Augmented(), num_workers=1, batch_size=8):
        pass  # PyTorch installs its handler over the user's
    cursor = Cursor(DataLoader(Slow(), batch_size=4, num_workers=1), 1)
    cursor.next_batch()
    calls.clear()
    worker = cursor._iterator._workers[0]
    os.kill(worker.pid, signal.SIGKILL)
    end_s = time.monotonic() + 5
    while not calls and time.monotonic() < end_s:
        sum(range(1000))
    assert calls  # the user's own handler still runs
    take_over_sigchld()
    assert len(run_to_end(cursor)) == 5
    cursor.close()
