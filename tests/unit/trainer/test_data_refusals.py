"""Data that could not be served a second time is refused, with the cure in the message."""

from __future__ import annotations

import pytest
from torch.utils.data import (
    DataLoader,
    IterableDataset,
)

from keepstep.errors import UsageError
from keepstep.trainer.data import Cursor
from tests.unit.trainer.loaders import (
    LOADERS,
    Augmented,
    CarriedOrder,
    LazySampler,
    run_to_end,
)


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
