"""Programs on graphs: layers of PyTorch Geometric, and messages by scatter."""

import torch
from ecosystem.programs import program
from torch import nn

F = nn.functional


def _graph(nodes: int = 12):
  """Return a ring with chords, both directions of each edge, and features."""
  a = torch.arange(nodes)
  pairs = torch.cat(
    [torch.stack([a, (a + 1) % nodes]), torch.stack([a, (a * 5) % nodes])], 1
  )
  return torch.cat([pairs, pairs.flip(0)], 1), torch.randn(nodes, 6), a % 3


def _train(model, inputs, labels, steps: int = 4):
  optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
  train = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
  train[::2] = True
  losses = []
  for _ in range(steps):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(*inputs)[train], labels[train])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  return losses


class Messages(nn.Module):
  """Layer of the mean and maximum of neighbours by scatter, and degrees by bincount."""

  def __init__(self, width: int, out: int):
    super().__init__()
    self.own, self.mean = nn.Linear(width, out), nn.Linear(width, out)
    self.most = nn.Linear(width, out)

  def forward(self, x, edges):
    source, target = edges
    index = target.unsqueeze(-1).expand(-1, x.size(1))
    degree = torch.bincount(target, minlength=x.size(0)).clamp(min=1)
    mean = torch.zeros_like(x).scatter_add_(0, index, x[source]) / degree[:, None]
    most = torch.full_like(x, -1e9).scatter_reduce(0, index, x[source], "amax")
    return self.own(x) + self.mean(mean) + self.most(most)


@program("messages by scatter_add, scatter_reduce, bincount and index_add")
def messages(device):
  edges, x, labels = _graph()
  first, second = Messages(6, 8), Messages(8, 3)

  class Net(nn.Module):
    def __init__(self):
      super().__init__()
      self.first, self.second = first, second

    def forward(self, x, edges):
      return self.second(F.relu(self.first(x, edges)), edges)

  model = Net().to(device)
  edges, x, labels = edges.to(device), x.to(device), labels.to(device)
  losses = _train(model, (x, edges), labels)
  pooled = torch.zeros(3, 3, device=device)
  pooled.index_add_(0, labels, model(x, edges).detach())
  return {"losses": losses, "pooled": pooled}


@program("PyTorch Geometric: GCN, GAT, SAGE, GIN layers", library="torch-geometric")
def graph_layers(device):
  from torch_geometric import nn as gnn

  edges, x, labels = _graph()
  inputs = (x.to(device), edges.to(device))
  found = {}
  for name in ("GCN", "GAT", "GraphSAGE", "GIN"):
    model = getattr(gnn, name)(6, 8, num_layers=2, out_channels=3).to(device)
    found[name] = _train(model, inputs, labels.to(device), steps=2)
  return found


@program(
  "PyTorch Geometric: batches of graphs, pooling, readout", library="torch-geometric"
)
def graph_batches(device):
  from torch_geometric.data import Batch, Data
  from torch_geometric.nn import GCNConv, TopKPooling, global_max_pool, global_mean_pool

  graphs = []
  for size in (6, 8, 10):
    edges, x, _ = _graph(size)
    graphs.append(Data(x=x, edge_index=edges, y=torch.tensor([size % 3])))
  batch = Batch.from_data_list(graphs).to(device)

  class Net(nn.Module):
    def __init__(self):
      super().__init__()
      self.conv, self.pool = GCNConv(6, 8), TopKPooling(8, ratio=0.5)
      self.linear = nn.Linear(16, 3)

    def forward(self, data):
      x = F.relu(self.conv(data.x, data.edge_index))
      x, _, _, batch, _, _ = self.pool(x, data.edge_index, batch=data.batch)
      pooled = [global_max_pool(x, batch), global_mean_pool(x, batch)]
      return self.linear(torch.cat(pooled, dim=1))

  model = Net().to(device)
  optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
  losses = []
  for _ in range(3):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch), batch.y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  return {"losses": losses, "graphs": batch.num_graphs}
