"""Scientific programs: differential equations, Gaussian processes, geometry."""

import math

import torch
from ecosystem.programs import program
from torch import nn


class Oscillator(nn.Module):
  """Small network as the right-hand side of a differential equation."""

  def __init__(self):
    super().__init__()
    self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    for layer in (self.net[0], self.net[2]):
      nn.init.normal_(layer.weight, std=0.3)
      nn.init.constant_(layer.bias, 0.0)

  def forward(self, t, y):
    return self.net(y**3)


def _spiral(device):
  t = torch.linspace(0.0, 2.0, 6).to(device)
  angle = t[:, None]
  return t, torch.cat([2 * torch.cos(angle), torch.sin(angle)], dim=1)[:, None, :]


def _fit(solve, device, steps: int, **options):
  t, true = _spiral(device)
  func = Oscillator().to(device)
  optimizer = torch.optim.SGD(func.parameters(), lr=1e-2)
  losses = []
  for _ in range(steps):
    optimizer.zero_grad()
    loss = torch.mean(torch.abs(solve(func, true[0], t, **options) - true))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  return {"losses": losses, "gradient": func.net[0].weight.grad}


@program(
  "torchdiffeq: odeint, dopri5 and rk4, a neural ODE", library="torchdiffeq", rtol=5e-3
)
def neural_ode(device):
  from torchdiffeq import odeint

  adaptive = _fit(odeint, device, 2, method="dopri5", rtol=1e-6, atol=1e-7)
  fixed = _fit(odeint, device, 2, method="rk4")
  return {**adaptive, "fixed": fixed["losses"]}


@program(
  "torchdiffeq: odeint_adjoint, a neural ODE",
  library="torchdiffeq",
  rtol=5e-3,
)
def adjoint(device):
  from torchdiffeq import odeint_adjoint

  adaptive = _fit(odeint_adjoint, device, 2, method="dopri5", rtol=1e-6, atol=1e-7)
  fixed = _fit(odeint_adjoint, device, 2, method="rk4")
  return {**adaptive, "fixed": fixed["losses"]}


@program("torchdiffeq: odeint_event, a bouncing ball", library="torchdiffeq")
def bouncing_ball(device):
  from torchdiffeq import odeint_event

  def fall(t, state):
    height, speed = state
    return speed, -9.8 * torch.ones_like(height)

  height = torch.tensor([2.0], device=device, requires_grad=True)
  state = (height, torch.tensor([0.0], device=device))
  start = torch.tensor([0.0], device=device)
  time, states = odeint_event(
    fall, state, start, event_fn=lambda t, s: s[0][0], atol=1e-6, rtol=1e-6
  )
  time.sum().backward()
  return {"time": time, "speed": states[1][-1], "gradient": height.grad}


@program(
  "gpytorch: exact regression, marginal likelihood", library="gpytorch", rtol=5e-3
)
def gaussian_process(device):
  import gpytorch

  class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
      super().__init__(x, y, likelihood)
      self.mean = gpytorch.means.ConstantMean()
      self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
      return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

  x = torch.linspace(0, 1, 24).to(device)
  y = torch.sin(x * (2 * math.pi)) + 0.1 * torch.cos(37 * x)
  likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device)
  model = Model(x, y, likelihood).to(device)
  model.train(), likelihood.train()
  optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
  mll, losses = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model), []
  for _ in range(5):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  model.eval(), likelihood.eval()
  with torch.no_grad(), gpytorch.settings.fast_pred_var():
    predicted = likelihood(model(torch.linspace(0, 1, 7).to(device)))
    lower, upper = predicted.confidence_region()
  return {"losses": losses, "mean": predicted.mean, "lower": lower, "upper": upper}


@program("gpytorch: variational classification", library="gpytorch", rtol=5e-3)
def variational_process(device):
  import gpytorch
  from gpytorch import variational

  class Model(gpytorch.models.ApproximateGP):
    def __init__(self, points):
      distribution = variational.CholeskyVariationalDistribution(
        points.size(0), mean_init_std=0.0
      )
      super().__init__(variational.VariationalStrategy(self, points, distribution))
      self.mean = gpytorch.means.ConstantMean()
      self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))

    def forward(self, x):
      return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

  x = torch.linspace(0, 1, 16)
  y = (torch.cos(x * 4 * math.pi) > 0).float()
  model = Model(x[::4].clone()).to(device)
  likelihood = gpytorch.likelihoods.BernoulliLikelihood().to(device)
  x, y = x.to(device), y.to(device)
  optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  mll, losses = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=16), []
  for _ in range(4):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  model.eval()
  with torch.no_grad():
    chance = likelihood(model(x)).mean
  return {"losses": losses, "chance": chance}


@program(
  "kornia: augmentations with parameters, homographies, morphology", library="kornia"
)
def image_geometry(device):
  import kornia

  image = torch.rand(2, 3, 16, 16).to(device).requires_grad_()
  smooth = kornia.filters.gaussian_blur2d(image, (5, 5), (1.0, 1.0))
  edges = kornia.filters.sobel(smooth)
  hsv = kornia.color.rgb_to_hsv(image)
  angle, center = torch.tensor([30.0, -10.0]), torch.tensor([[8.0, 8.0]] * 2)
  scale = torch.ones(2, 2)
  matrix = kornia.geometry.get_rotation_matrix2d(
    center.to(device), angle.to(device), scale.to(device)
  )
  turned = kornia.geometry.warp_affine(image, matrix, dsize=(16, 16))
  corners = torch.tensor([[[0.0, 0.0], [15, 0], [15, 15], [0, 15]]] * 2).to(device)
  moved = corners + torch.tensor([1.0, 2.0], device=device)
  homography = kornia.geometry.get_perspective_transform(corners, moved)
  warped = kornia.geometry.warp_perspective(image, homography, (16, 16))
  opened = kornia.morphology.opening(image, torch.ones(3, 3, device=device))
  ssim = kornia.losses.ssim_loss(image, smooth.detach(), 5)
  total = edges.mean() + hsv.mean() + turned.mean() + warped.mean() + ssim
  total.backward()
  rotation = kornia.geometry.axis_angle_to_rotation_matrix(
    torch.tensor([[0.1, 0.2, 0.3]], device=device)
  )
  return {
    "total": total,
    "opened": opened.mean((2, 3)),
    "homography": homography,
    "rotation": rotation,
    "gradient": image.grad.mean((2, 3)),
  }


@program("kornia: random augmentations, a keypoint detector", library="kornia")
def augmentation(device):
  import kornia.augmentation as K
  import kornia.feature as KF

  image = torch.zeros(1, 1, 32, 32)
  image[:, :, 8:24, 8:24] = 1
  image = image.to(device)
  flip = K.AugmentationSequential(
    K.RandomHorizontalFlip(p=1.0),
    K.RandomVerticalFlip(p=1.0),
    data_keys=["input", "mask"],
  )
  flipped, mask = flip(image[:, :, :, :20], (image > 0.5).float()[:, :, :, :20])
  jitter = K.AugmentationSequential(
    K.ColorJiggle(0.1, 0.1, 0.1, 0.1, p=1.0),
    K.RandomAffine(10.0, p=1.0),
    K.RandomErasing(p=0.5),
    K.Normalize(mean=torch.zeros(3), std=torch.ones(3)),
  )
  jittered = jitter(image.expand(2, 3, 32, 32))
  response = KF.harris_response(image, k=0.04)
  hardest = response.flatten().topk(4).values
  return {
    "flipped": flipped,
    "mask": mask,
    "shape": list(jittered.shape),
    "finite": jittered.isfinite().all().item(),
    "harris": hardest,
  }


class Sequence(nn.Module):
  """Two LSTM cells that predict the next value of a wave."""

  def __init__(self):
    super().__init__()
    self.lstm1, self.lstm2 = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8)
    self.linear = nn.Linear(8, 1)

  def forward(self, x, future: int = 0):
    outputs = []
    h1, c1, h2, c2 = (x.new_zeros(x.size(0), 8) for _ in range(4))
    for part in x.split(1, dim=1):
      h1, c1 = self.lstm1(part, (h1, c1))
      h2, c2 = self.lstm2(h1, (h2, c2))
      outputs += [self.linear(h2)]
    for _ in range(future):
      h1, c1 = self.lstm1(outputs[-1], (h1, c1))
      h2, c2 = self.lstm2(h1, (h2, c2))
      outputs += [self.linear(h2)]
    return torch.cat(outputs, dim=1)


@program("time sequence: LSTM cells, LBFGS with a closure, predictions", rtol=2e-2)
def time_sequence(device):
  wave = torch.sin(torch.arange(13.0) / 2 + torch.arange(4.0)[:, None]).to(device)
  model, criterion = Sequence().to(device), nn.MSELoss()
  optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
  losses = []

  def closure():
    optimizer.zero_grad()
    loss = criterion(model(wave[:, :-1]), wave[:, 1:])
    loss.backward()
    return loss

  for _ in range(2):
    losses.append(optimizer.step(closure).item())
  with torch.no_grad():
    predicted = model(wave[:, :-1], future=3)
  return {"losses": losses, "predicted": predicted[:, -3:]}


@program("geoopt: parameters on manifolds, Riemannian optimizers", library="geoopt")
def manifolds(device):
  import geoopt

  class Embedding(nn.Module):
    def __init__(self):
      super().__init__()
      self.ball, self.frames = geoopt.PoincareBall(), geoopt.Stiefel()
      points = self.ball.expmap0(0.3 * torch.randn(5, 3))
      self.points = geoopt.ManifoldParameter(points, manifold=self.ball)
      frame = torch.linalg.qr(torch.randn(4, 3))[0]
      self.frame = geoopt.ManifoldParameter(frame, manifold=self.frames)

    def forward(self, target):
      spread = self.ball.dist(self.points[:, None], self.points[None]).mean()
      return (
        self.ball.dist0(self.points).square().sum()
        - spread
        + ((self.frame - target).square().sum())
      )

  model, target = Embedding().to(device), torch.randn(4, 3).to(device)
  losses = []
  for optimizer in (
    geoopt.optim.RiemannianAdam(model.parameters(), lr=1e-2),
    geoopt.optim.RiemannianSGD(model.parameters(), lr=1e-2, momentum=0.9),
  ):
    for _ in range(3):
      optimizer.zero_grad()
      loss = model(target)
      loss.backward()
      optimizer.step()
      losses.append(loss.item())
  return {
    "losses": losses,
    "points": model.points,
    "on the manifold": torch.allclose(
      model.frame.T @ model.frame, torch.eye(3, device=device), atol=1e-4
    ),
    "class": isinstance(model.points, geoopt.ManifoldParameter),
  }
