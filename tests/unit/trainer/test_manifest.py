"""What a rank says of its state: sorted into parts, equal identities where bytes must be equal, digests that tell."""

from __future__ import annotations

import torch
from torch import nn

from keepstep.core.replicas import PER_RANK
from keepstep.trainer.adapters.manifest import BUFFERS, OPTIMIZER, PARAMETERS, REST, VALUES, Manifest
from keepstep.trainer.adapters.protected import Protected


def trained(width: int = 4, seed: int = 0) -> Protected:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
    model.register_buffer("table", torch.arange(6.0))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    protected = Protected()
    protected.add(model=model, optimizer=optimizer, totals={"batches": seed})
    protected.add_per_rank(seen={"samples": 3})
    return protected


OWN = ("model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked")


def by_part(manifest: Manifest) -> dict:
    return {part.part: part for part in manifest.parts()}


def test_every_tensor_stands_in_its_part_with_name_size_and_type() -> None:
    parts = by_part(Manifest(trained(), OWN, record_bytes=10_000))
    assert set(parts) == {PARAMETERS, OPTIMIZER, BUFFERS, VALUES, PER_RANK}
    assert parts[PARAMETERS].bytes == 4 * (3 * 4 + 4 + 4 + 4)
    assert parts[PARAMETERS].largest["model.0.weight"] == 48
    assert parts[PARAMETERS].dtypes == {"float32": 96}
    assert parts[OPTIMIZER].tensors == 3 * 4
    assert parts[OPTIMIZER].largest["optimizer/model.0.weight/exp_avg"] == 48
    assert list(parts[BUFFERS].largest) == ["model.table"]
    assert parts[PER_RANK].bytes == 10_000
    assert parts[PER_RANK].tensors == 3
    assert {"seen", REST, *OWN} == set(parts[PER_RANK].largest)


def test_identity_is_structure_and_not_content() -> None:
    one, other, wider = (by_part(Manifest(p, OWN)) for p in (trained(), trained(seed=1), trained(width=5)))
    assert {n: p.identity for n, p in one.items()} == {n: p.identity for n, p in other.items()}
    assert one[PARAMETERS].identity != wider[PARAMETERS].identity
    assert one[OPTIMIZER].identity != wider[OPTIMIZER].identity


def test_digests_tell_where_two_ranks_differ() -> None:
    one, same, other = (Manifest(p, OWN).digests() for p in (trained(), trained(), trained(seed=1)))
    assert one == same
    assert PER_RANK not in one, "what is one rank's own is compared with nobody's"
    differing = {part for part in one if one[part] != other[part]}
    assert differing == {PARAMETERS, OPTIMIZER, VALUES}


def test_a_large_tensor_is_compared_at_both_its_ends() -> None:
    found = []
    for place in (None, 0, -1):
        protected, model = Protected(), nn.Linear(1, 100_000, bias=False)
        nn.init.zeros_(model.weight)
        if place is not None:
            with torch.no_grad():
                model.weight[place] = 1.0
        protected.add(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        found.append(Manifest(protected, ()).digests()[PARAMETERS])
    assert len(set(found)) == 3


def test_names_are_bounded() -> None:
    protected = Protected()
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    protected.add(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    part = by_part(Manifest(protected, ()))[PARAMETERS]
    assert part.tensors == 80
    assert len(part.largest) == 24
