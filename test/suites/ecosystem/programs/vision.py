"""Programs on images: classifiers, autoencoders, adversarial networks."""

import torch
from ecosystem.programs import program
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

F = nn.functional


class Digits(nn.Module):
  """Network of two convolutions and two linear layers."""

  def __init__(self):
    super().__init__()
    self.conv1 = nn.Conv2d(1, 8, 3)
    self.conv2 = nn.Conv2d(8, 16, 3)
    self.dropout = nn.Dropout(0.25)
    self.fc1 = nn.Linear(16 * 25, 32)
    self.fc2 = nn.Linear(32, 10)

  def forward(self, x):
    x = F.relu(self.conv2(F.relu(self.conv1(x))))
    x = self.dropout(torch.flatten(F.max_pool2d(x, 2), 1))
    return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def _striped_images(count: int):
  """Return images whose bright row is their class."""
  labels = torch.arange(count) % 10
  images = 0.1 * torch.randn(count, 1, 14, 14)
  images[torch.arange(count), 0, labels] += 1
  return images, labels


@program("digits: CNN, Adadelta, StepLR, test accuracy")
def digits(device):
  images, labels = _striped_images(192)
  train = DataLoader(TensorDataset(images[:128], labels[:128]), 32, shuffle=True)
  test = DataLoader(TensorDataset(images[128:], labels[128:]), 32)
  model = Digits().to(device)
  optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
  scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
  model.train()
  for _ in range(8):
    for data, target in train:
      data, target = data.to(device), target.to(device)
      optimizer.zero_grad()
      loss = F.nll_loss(model(data), target)
      loss.backward()
      optimizer.step()
    scheduler.step()
  model.eval()
  test_loss, correct = 0.0, 0
  with torch.no_grad():
    for data, target in test:
      data, target = data.to(device), target.to(device)
      output = model(data)
      test_loss += F.nll_loss(output, target, reduction="sum").item()
      pred = output.argmax(dim=1, keepdim=True)
      correct += pred.eq(target.view_as(pred)).sum().item()
  return {"learned": correct >= 60 and test_loss < 40, "rate": scheduler.get_last_lr()}


class DropPath(nn.Module):
  """Stochastic depth; a probability of 0 keeps every sample."""

  def __init__(self, p: float):
    super().__init__()
    self.p = p

  def forward(self, x):
    if self.p == 0 or not self.training:
      return x
    keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.p)
    return x * keep.div_(1 - self.p)


class Block(nn.Module):
  """Block of pre-norm attention and MLP with layer scale."""

  def __init__(self, dim: int, heads: int, drop_path: float):
    super().__init__()
    self.heads = heads
    self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
    self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
    self.mlp = nn.Sequential(
      nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
    )
    self.gamma = nn.Parameter(0.1 * torch.ones(dim))
    self.drop_path = DropPath(drop_path)

  def attend(self, x):
    b, n, c = x.shape
    qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    x = F.scaled_dot_product_attention(q, k, v)
    return self.proj(x.transpose(1, 2).reshape(b, n, c))

  def forward(self, x):
    x = x + self.drop_path(self.gamma * self.attend(self.norm1(x)))
    return x + self.drop_path(self.gamma * self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
  """Transformer on patches, with a class token and positions resized to the image."""

  def __init__(self, dim=32, depth=2, heads=4, classes=5, drop_path=0.0):
    super().__init__()
    self.patch = nn.Conv2d(3, dim, 4, stride=4)
    self.cls = nn.Parameter(torch.zeros(1, 1, dim))
    self.pos = nn.Parameter(0.02 * torch.randn(1, 17, dim))
    nn.init.trunc_normal_(self.cls, std=0.02)
    rates = [r.item() for r in torch.linspace(0, drop_path, depth)]
    self.blocks = nn.ModuleList([Block(dim, heads, rate) for rate in rates])
    self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

  def positions(self, height: int, width: int):
    cls, grid = self.pos[:, :1], self.pos[:, 1:]
    side = int(grid.shape[1] ** 0.5)
    if (height, width) == (side, side):
      return self.pos
    grid = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, (height, width), mode="bicubic", antialias=True)
    return torch.cat([cls, grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)

  def forward(self, x):
    x = self.patch(x)
    height, width = x.shape[-2:]
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
    x = x + self.positions(height, width)
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x)[:, 0])


@program("vision transformer: AdamW with groups, label smoothing, EMA, two resolutions")
def vision_transformer(device):
  images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 5
  model = VisionTransformer().to(device)
  average = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
  )
  decayed = [p for p in model.parameters() if p.ndim > 1]
  others = [p for p in model.parameters() if p.ndim <= 1]
  groups = [
    {"params": decayed, "weight_decay": 0.05},
    {"params": others, "weight_decay": 0.0},
  ]
  optimizer = torch.optim.AdamW(groups, lr=1e-3)
  scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=5)
  loss_fn, losses = nn.CrossEntropyLoss(label_smoothing=0.1), []
  for _ in range(5):
    loss = loss_fn(model(images.to(device)), labels.to(device))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    average.update_parameters(model)
    losses.append(loss.item())
  model.eval()
  with torch.inference_mode():
    larger = average(torch.ones(1, 3, 24, 24, device=device))
    top = model(images.to(device)).topk(3).indices
  return {"losses": losses, "larger": larger, "top": top}


class Residual(nn.Module):
  """Two convolutions with batch norm, a squeeze-and-excitation gate and a shortcut."""

  def __init__(self, width: int, stride: int):
    super().__init__()
    out = width * stride
    self.body = nn.Sequential(
      nn.Conv2d(width, out, 3, stride, 1, bias=False),
      nn.BatchNorm2d(out),
      nn.SiLU(inplace=True),
      nn.Conv2d(out, out, 3, 1, 1, groups=out, bias=False),
      nn.BatchNorm2d(out),
    )
    self.gate = nn.Sequential(
      nn.AdaptiveAvgPool2d(1),
      nn.Conv2d(out, 4, 1),
      nn.ReLU(inplace=True),
      nn.Conv2d(4, out, 1),
      nn.Sigmoid(),
    )
    self.shortcut = nn.Conv2d(width, out, 1, stride) if stride > 1 else nn.Identity()

  def forward(self, x):
    y = self.body(x)
    return F.relu_(y * self.gate(y) + self.shortcut(x))


@program("residual network: SGD with momentum, mixup, features by hooks, state dict")
def residual_network(device):
  stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
  head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
  model = nn.Sequential(stem, Residual(8, 1), Residual(8, 2), head)
  images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
  model = model.to(device, memory_format=torch.channels_last)
  features = []
  model[2].register_forward_hook(
    lambda module, args, out: features.append(out.detach())
  )
  optimizer = torch.optim.SGD(
    model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4
  )
  x, target = images.to(device), F.one_hot(labels.to(device), 4).float()
  losses = []
  for step in range(4):
    share = 0.3 + 0.1 * step
    mixed = x.mul(share).add_(x.flip(0).mul_(1 - share))
    soft = target * share + target.flip(0) * (1 - share)
    loss = torch.sum(-soft * F.log_softmax(model(mixed), dim=-1), dim=-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  saved = {name: value.cpu() for name, value in model.state_dict().items()}
  model.load_state_dict(saved)
  variance = saved["0.1.running_var"]
  return {"losses": losses, "features": features[-1].mean((0, 2, 3)), "var": variance}


class Autoencoder(nn.Module):
  """Variational autoencoder of two linear layers each way."""

  def __init__(self):
    super().__init__()
    self.fc1, self.mean = nn.Linear(64, 32), nn.Linear(32, 4)
    self.logvar = nn.Linear(32, 4)
    self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 64)

  def decode(self, z):
    return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

  def forward(self, x):
    hidden = F.relu(self.fc1(x.view(-1, 64)))
    mean, logvar = self.mean(hidden), self.logvar(hidden)
    std = torch.exp(0.5 * logvar)
    return self.decode(mean + torch.randn_like(std) * std), mean, logvar


@program("variational autoencoder: reparametrization, BCE and KL, samples")
def autoencoder(device):
  images = torch.rand(64, 1, 8, 8).round()
  images[:, :, 4:] = images[:, :, :4]
  loader = DataLoader(TensorDataset(images), batch_size=32, shuffle=True)
  model = Autoencoder().to(device)
  optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
  epochs = []
  for _ in range(10):
    total = 0.0
    for (data,) in loader:
      data = data.to(device)
      optimizer.zero_grad()
      recon, mean, logvar = model(data)
      bce = F.binary_cross_entropy(recon, data.view(-1, 64), reduction="sum")
      kld = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
      (bce + kld).backward()
      total += (bce + kld).item()
      optimizer.step()
    epochs.append(total / len(images))
  with torch.no_grad():
    sample = model.decode(torch.randn(5, 4).to(device)).cpu()
  return {
    "start": abs(epochs[0] - 46) < 4,
    "learns": epochs[-1] < epochs[0] - 1,
    "samples": list(sample.shape),
  }


def _weights_init(module):
  name = module.__class__.__name__
  if "Conv" in name:
    nn.init.normal_(module.weight, 0.0, 0.02)
  elif "BatchNorm" in name:
    nn.init.normal_(module.weight, 1.0, 0.02)
    nn.init.zeros_(module.bias)


@program("adversarial networks: transposed convolutions, two optimizers, detach")
def adversarial_networks(device):
  generator = nn.Sequential(
    nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(True),
    nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
  )
  critic = nn.Sequential(
    nn.Conv2d(3, 16, 4, 2, 1, bias=False),
    nn.BatchNorm2d(16),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
  )
  generator.apply(_weights_init).to(device)
  critic.apply(_weights_init).to(device)
  criterion = nn.BCELoss()
  of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
  of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
  real, noises = torch.randn(8, 3, 8, 8), torch.randn(3, 8, 8, 1, 1)
  losses = []
  for noise in noises:
    critic.zero_grad()
    label = torch.full((8,), 1.0, dtype=torch.float32, device=device)
    loss_real = criterion(critic(real.to(device)).view(-1), label)
    loss_real.backward()
    fake = generator(noise.to(device))
    label.fill_(0.0)
    loss_fake = criterion(critic(fake.detach()).view(-1), label)
    loss_fake.backward()
    of_critic.step()
    generator.zero_grad()
    label.fill_(1.0)
    loss_generator = criterion(critic(fake).view(-1), label)
    loss_generator.backward()
    of_generator.step()
    losses += [loss_real.item(), loss_fake.item(), loss_generator.item()]
  return {"losses": losses, "fake": fake.detach().mean((0, 2, 3))}


@program("super resolution: pixel shuffle, orthogonal weights, PSNR")
def super_resolution(device):
  layers = [
    nn.Conv2d(1, 16, 5, 1, 2),
    nn.Conv2d(16, 8, 3, 1, 1),
    nn.Conv2d(8, 4, 3, 1, 1),
  ]
  for layer in layers[:2]:
    nn.init.orthogonal_(layer.weight, nn.init.calculate_gain("relu"))
  nn.init.orthogonal_(layers[2].weight)
  model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
  model = nn.Sequential(model, nn.PixelShuffle(2)).to(device)
  large = torch.rand(4, 1, 16, 16).to(device)
  small = F.interpolate(large, scale_factor=0.5, mode="bilinear")
  criterion, losses = nn.MSELoss(), []
  optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
  for _ in range(5):
    optimizer.zero_grad()
    loss = criterion(model(small), large)
    losses.append(loss.item())
    loss.backward()
    optimizer.step()
  with torch.no_grad():
    psnr = 10 * torch.log10(1 / criterion(model(small), large))
  return {"losses": losses, "psnr": psnr}
