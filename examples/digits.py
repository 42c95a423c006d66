"""The quick start: a small network learns to tell ten noisy patterns apart.

keepstep run --nproc-per-node 2 --spares 1 examples/digits.py
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

run = keepstep.init()  # in place of dist.init_process_group; spares wait here

torch.manual_seed(0)
labels = torch.arange(6400) % 10
images = torch.randn(10, 64)[labels] + 1.5 * torch.randn(6400, 64)
data = TensorDataset(images, labels)
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))

layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model = DDP(layers.to(run.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
run.protect(model=model, optimizer=optimizer)  # what a replacement receives

for step in run.steps(loader, epochs=3):
    with step as (x, y):  # interrupted? the same batch is served again
        loss = F.cross_entropy(model(x.to(run.device)), y.to(run.device))
        loss.backward()
        run.report(loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()

if run.live and run.rank == 0:
    print(f"last loss {loss.item():.4f}")
