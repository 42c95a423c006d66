"""The cursor serves what a plain loop would, and any process can take it over at any batch."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
)

from keepstep.errors import UsageError
from keepstep.trainer import values
from keepstep.trainer.adapters import rng
from keepstep.trainer.data import Cursor, clone, mutated, snapshot_versions
from tests.unit.trainer.loaders import (
    LOADERS,
    SAMPLES,
    Augmented,
    Loads,
    plain_run,
    records,
    resumed,
    run_to_end,
    same,
    seed,
    seeded_generator,
)


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
