"""The cursor serves what a plain loop would, and any process can take it over at any batch."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from keepstep.errors import UsageError
from keepstep.trainer import values
from keepstep.trainer.adapters import rng
from keepstep.trainer.adapters.loader_workers import LoaderWorkerDeath, take_over_sigchld
from keepstep.trainer.data import Cursor, clone, mutated, snapshot_versions

SAMPLES = 23


class Augmented(Dataset):
    """Sample i: [i, torch's draw, Python's draw], so that any wrong draw shows."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index), float(torch.rand(())), random.random()], dtype=torch.float64)


class Loads(Augmented):
    def __init__(self):
        self.loaded = []

    def __getitem__(self, index):
        self.loaded.append(index)
        return super().__getitem__(index)


class EagerSampler:
    """Draws in __iter__ itself, not at the first item."""

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(torch.randperm(SAMPLES).tolist())


class PythonSampler:
    def __len__(self):
        return SAMPLES

    def __iter__(self):
        order = list(range(SAMPLES))
        random.shuffle(order)
        return iter(order)


class SamplerWithoutLength:
    def __iter__(self):
        for index in range(SAMPLES):
            yield (index * 7) % SAMPLES


class CarriedOrder:
    """Shuffles its order further in every epoch: a fresh process cannot know it."""

    def __init__(self):
        self.order = list(range(SAMPLES))

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        random.Random(1).shuffle(self.order)
        return iter(self.order)


class LazySampler:
    def __iter__(self):
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()))


def seeded_generator():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "sequential": lambda **kw: DataLoader(Augmented(), batch_size=4, **kw),
    "shuffle": lambda **kw: DataLoader(Augmented(), batch_size=4, shuffle=True, **kw),
    "shuffle drop_last": lambda **kw: DataLoader(
        Augmented(), batch_size=4, shuffle=True, drop_last=True, **kw
    ),
    "shuffle own generator": lambda **kw: DataLoader(
        Augmented(), batch_size=4, shuffle=True, generator=seeded_generator(), **kw
    ),
    "replacement": lambda **kw: DataLoader(
        Augmented(),
        batch_size=4,
        sampler=RandomSampler(Augmented(), replacement=True, num_samples=40, generator=seeded_generator()),
        **kw,
    ),
    "no batches": lambda **kw: DataLoader(Augmented(), batch_size=None, shuffle=True, **kw),
    "subset": lambda **kw: DataLoader(
        Augmented(), batch_size=4, sampler=SubsetRandomSampler(range(3, SAMPLES)), **kw
    ),
    "weighted": lambda **kw: DataLoader(
        Augmented(), batch_size=4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), **kw
    ),
    "distributed": lambda **kw: DataLoader(
        Augmented(), batch_size=3, sampler=DistributedSampler(Augmented(), 3, 1, seed=2), **kw
    ),
    "batch sampler": lambda **kw: DataLoader(
        Augmented(), batch_sampler=BatchSampler(RandomSampler(Augmented()), 5, False), **kw
    ),
    "eager": lambda **kw: DataLoader(Augmented(), batch_size=4, sampler=EagerSampler(), **kw),
    "eager no batches": lambda **kw: DataLoader(Augmented(), batch_size=None, sampler=EagerSampler(), **kw),
    "python": lambda **kw: DataLoader(Augmented(), batch_size=4, sampler=PythonSampler(), **kw),
    "without length": lambda **kw: DataLoader(
        Augmented(), batch_size=4, sampler=SamplerWithoutLength(), **kw
    ),
    "list": lambda **kw: DataLoader(Augmented(), batch_sampler=[[0, 1], [5], [7, 8, 9]], **kw),
}


def seed(value=0):
    torch.manual_seed(value)
    random.seed(value)


def step(batch):
    """A training step that draws (dropout), and may not disturb the data."""
    return float(batch.sum()) + float(torch.rand(()))


def plain_run(loader, epochs):
    out = []
    for epoch in range(epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        out += [(clone(batch), step(batch)) for batch in loader]
    return out


def run_to_end(cursor):
    out = []
    while True:
        try:
            batch = cursor.next_batch()
        except StopIteration:
            return out
        out.append((clone(batch), step(batch)))


def same(left, right):
    return len(left) == len(right) and all(
        torch.equal(a, b) and x == y for (a, x), (b, y) in zip(left, right, strict=True)
    )


def records(cursor):
    """Run to the end, keeping before every step what a rank's record would hold."""
    kept, out = [], []
    while True:
        kept.append((values.to_bytes(cursor.state()), rng.capture()))
        try:
            batch = cursor.next_batch()
        except StopIteration:
            return kept, out
        out.append((clone(batch), step(batch)))


def resumed(make, epochs, record):
    """What another process serves: other random state, a loader of its own."""
    seed(99)
    torch.rand(17)
    cursor = Cursor(make(), epochs)
    cursor.restore(values.from_bytes(record[0]))
    rng.restore(record[1])
    try:
        return run_to_end(cursor)
    finally:
        cursor.close()


@pytest.mark.parametrize("name", LOADERS)
def test_undisturbed_cursor_equals_the_plain_loop_with_every_random_draw(name):
    seed()
    expected = plain_run(LOADERS[name](), 2)
    after = torch.get_rng_state()
    seed()
    assert same(run_to_end(Cursor(LOADERS[name](), 2)), expected)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("name", LOADERS)
def test_another_process_goes_on_bit_for_bit_at_every_batch(name):
    seed()
    kept, expected = records(Cursor(LOADERS[name](), 2))
    for position, record in enumerate(kept):
        assert same(resumed(LOADERS[name], 2, record), expected[position:]), position


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


def test_every_sample_exactly_once_per_epoch_over_three_ranks_in_spite_of_resumes():
    def make(rank):
        return DataLoader(
            Augmented(), batch_size=2, sampler=DistributedSampler(Augmented(), 3, rank, drop_last=False)
        )

    for resume_at in range(8):
        for epoch in range(2):
            served = Counter()
            for rank in range(3):
                seed(rank)
                cursor, batches = Cursor(make(rank), 2), 0
                while True:
                    if cursor.batch == resume_at and cursor.epoch == epoch:
                        state, replacement = cursor.state(), Cursor(make(rank), 2)
                        replacement.restore(state)
                        cursor = replacement
                    try:
                        batch = cursor.next_batch()
                    except StopIteration:
                        break
                    in_epoch = cursor.epoch
                    if in_epoch == epoch:
                        served.update(int(value) for value in batch[:, 0])
                        batches += 1
                assert batches == 4
            # 23 samples over 3 ranks: DistributedSampler pads with one sample twice.
            assert set(served) == set(range(SAMPLES)) and sum(served.values()) == SAMPLES + 1


def test_skipped_batches_are_not_loaded():
    seed()
    cursor = Cursor(DataLoader(Loads(), batch_size=4, shuffle=True), 1)
    for _ in range(4):
        cursor.next_batch()
    state, dataset = cursor.state(), Loads()
    replacement = Cursor(DataLoader(dataset, batch_size=4, shuffle=True), 1)
    replacement.restore(state)
    assert dataset.loaded == []
    replacement.next_batch()
    assert len(dataset.loaded) == 4


def test_counters_name_the_next_batch():
    cursor = Cursor(LOADERS["sequential"](), 2)
    assert (cursor.epoch, cursor.batch, cursor.batches_served, cursor.batches_per_epoch) == (0, 0, 0, 6)
    for _ in range(7):
        cursor.next_batch()
    assert (cursor.epoch, cursor.batch, cursor.batches_served) == (1, 1, 7)
    assert Cursor(LOADERS["without length"](), 1).batches_per_epoch is None


def test_without_epochs_the_cursor_never_ends():
    cursor = Cursor(LOADERS["sequential"](), None)
    for _ in range(20):
        cursor.next_batch()
    assert cursor.epoch == 3


def test_state_is_cheap_and_its_bytes_are_cached():
    cursor = Cursor(LOADERS["shuffle"](), 1)
    cursor.next_batch()
    first = cursor.state()
    cursor.next_batch()
    assert cursor.state()["origin"] is first["origin"]
    best_s = min(_timed_s(cursor.state) for _ in range(200))
    assert best_s < 50e-6


def _timed_s(call):
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def test_a_spare_that_rehearsed_as_another_rank_serves_the_dead_ranks_batches():
    def make(rank):
        return DataLoader(Augmented(), batch_size=2, sampler=DistributedSampler(Augmented(), 3, rank))

    seed()
    kept, expected = records(Cursor(make(2), 2))
    spare = Cursor(make(1), 2)
    spare.next_batch()
    spare.next_batch()
    spare.set_rank(1, 2, 3)
    spare.restore(values.from_bytes(kept[5][0]))
    rng.restore(kept[5][1])
    assert same(run_to_end(spare), expected[5:])


@pytest.mark.parametrize(
    ("shares", "share", "old", "new", "expected"),
    [(4, 1, 1, 3, 3), (2, 0, 1, 3, 1), (2, 1, 1, 2, 0), (4, 3, 3, 0, 0)],
)
def test_share_follows_the_rank_in_blocks_and_strides(shares, share, old, new, expected):
    sampler = DistributedSampler(Augmented(), shares, share)
    Cursor(DataLoader(Augmented(), sampler=sampler)).set_rank(old, new, 4)
    assert sampler.rank == expected


def test_share_that_the_rank_does_not_explain_is_refused():
    cursor = Cursor(DataLoader(Augmented(), sampler=DistributedSampler(Augmented(), 2, 0)))
    with pytest.raises(UsageError, match="on_rank_change"):
        cursor.set_rank(0, 1, 4)  # block or stride: rank 0 fits both, rank 1 differs


def test_initial_state_and_restart_undo_a_rehearsal():
    seed()
    cursor = Cursor(LOADERS["shuffle own generator"](), 1)
    start = cursor.state()
    expected = [batch[:, 0].tolist() for batch, _ in run_to_end(cursor)]
    cursor.restore(start)
    assert [batch[:, 0].tolist() for batch, _ in run_to_end(cursor)] == expected
    before = torch.get_rng_state()
    cursor.restart()
    assert torch.equal(torch.get_rng_state(), before)
    assert [batch[:, 0].tolist() for batch, _ in run_to_end(cursor)] == expected


def test_generator_shared_by_sampler_and_augmentation_goes_on_exactly():
    def make():
        generator = seeded_generator()

        class Shared(Augmented):
            def __getitem__(self, index):
                return torch.cat([super().__getitem__(index), torch.rand(1, generator=generator).double()])

        return DataLoader(Shared(), batch_size=4, shuffle=True, generator=generator)

    seed()
    kept, expected = records(Cursor(make(), 2))
    for position, record in enumerate(kept):
        assert same(resumed(make, 2, record), expected[position:]), position


# ---- refusals -----------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class OwnLoader(DataLoader):
    def __iter__(self):
        return iter([1, 2])


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        ([1, 2, 3], "list.*until=N"),
        ((i for i in range(3)), "generator.*until=N"),
        (DataLoader(Stream()), "Stream is iterable-style"),
        (OwnLoader(Augmented()), "OwnLoader makes iterators of its own"),
        (DataLoader(Augmented(), num_workers=1, in_order=False), "in_order"),
        (DataLoader(Augmented(), sampler=(i for i in range(3))), "read only once"),
    ],
    ids=["list", "generator", "iterable dataset", "own __iter__", "in_order", "one-shot sampler"],
)
def test_data_that_cannot_be_served_again_is_refused_with_the_cure(loader, says):
    with pytest.raises(UsageError, match=says):
        Cursor(loader)


def test_sampler_that_draws_amid_the_training_draws_is_refused():
    cursor = Cursor(DataLoader(Augmented(), batch_size=4, sampler=LazySampler()))
    with pytest.raises(UsageError, match="LazySampler draws from the global random generator"):
        run_to_end(cursor)


def test_sampler_that_does_not_repeat_itself_is_found_out_at_the_resume():
    cursor = Cursor(DataLoader(Augmented(), batch_size=4, sampler=CarriedOrder()), 2)
    for _ in range(8):
        cursor.next_batch()
    replacement = Cursor(DataLoader(Augmented(), batch_size=4, sampler=CarriedOrder()), 2)
    with pytest.raises(UsageError, match="CarriedOrder did not repeat its order of epoch 1"):
        replacement.restore(cursor.state())


def test_shorter_dataset_is_found_out_at_the_resume():
    cursor = Cursor(LOADERS["sequential"](), 1)
    for _ in range(6):
        cursor.next_batch()
    replacement = Cursor(DataLoader(range(8), batch_size=4), 1)
    with pytest.raises(UsageError, match="ended after 2 batches"):
        replacement.restore(cursor.state())


def test_empty_loader_is_refused_instead_of_looping_for_ever():
    with pytest.raises(UsageError, match="no batch at all"):
        Cursor(DataLoader(range(3), batch_size=4, drop_last=True), None).next_batch()


def test_loader_that_does_not_shard_is_only_warned_about():
    assert Cursor(LOADERS["shuffle"]()).warnings(1) == ()
    assert Cursor(LOADERS["distributed"]()).warnings(3) == ()
    (text,) = Cursor(LOADERS["shuffle"]()).warnings(2)
    assert "DistributedSampler" in text


# ---- loader workers that die --------------------------------------------------------------------


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


# ---- batches ------------------------------------------------------------------------------------


def test_batch_changed_in_place_is_noticed_and_a_clone_is_not_touched():
    batch = {"x": torch.zeros(3), "rest": [torch.ones(2), ("name", torch.arange(3))]}
    kept, versions = clone(batch), snapshot_versions(batch)
    assert not mutated(batch, versions)
    batch["rest"][1][1].add_(1)
    assert mutated(batch, versions)
    assert kept["rest"][1][1].tolist() == [0, 1, 2]


def test_batch_whose_entry_was_replaced_counts_as_changed():
    batch = {"x": torch.zeros(3)}
    versions = snapshot_versions(batch)
    batch["x"] = batch["x"] * 2
    assert mutated(batch, versions)
