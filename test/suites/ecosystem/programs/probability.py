"""Probabilistic programs: normalizing flows, variational inference."""

import torch
from ecosystem.programs import program


def _moons(device):
  angle = torch.linspace(0, 3.1, 12)
  return torch.stack([angle.cos(), angle.sin() - 0.3], dim=1).to(device)


@program("zuko: spline and coupling flows, samples", library="zuko")
def normalizing_flows(device):
  import zuko

  x, values = _moons(device), {}
  flows = {
    "spline": zuko.flows.NSF(2, context=1, transforms=2, hidden_features=(8,)),
    "coupling": zuko.flows.NICE(2, context=1, transforms=2, hidden_features=(8,)),
  }
  context = torch.linspace(-1, 1, len(x))[:, None].to(device)
  for name, flow in flows.items():
    flow.to(device)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
      loss = -flow(context).log_prob(x).mean()
      optimizer.zero_grad()
      loss.backward()
      optimizer.step()
      losses.append(loss.item())
    samples = flow(context[:4]).sample((3,))
    values[name] = losses
    values[f"{name} samples"] = samples.shape == (3, 4, 2) and bool(
      samples.isfinite().all()
    )
  return values


@program("pyro: SVI with guides, plates, enumeration, HMC", library="pyro-ppl")
def variational_inference(device):
  import pyro
  from pyro import distributions as dist
  from pyro.infer import HMC, MCMC, SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate
  from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_value

  x = torch.linspace(-1, 1, 12).to(device)
  y, zero = 2 * x + 0.5, torch.zeros((), device=device)

  def line(x, y):
    slope = pyro.sample("slope", dist.Normal(zero, 1.0))
    offset = pyro.sample("offset", dist.Normal(zero, 1.0))
    with pyro.plate("data", len(x)):
      pyro.sample("y", dist.Normal(slope * x + offset, 0.5), obs=y)

  @config_enumerate
  def mixture(y):
    centers = pyro.param("centers", torch.tensor([-1.0, 1.0], device=device))
    with pyro.plate("data", len(y)):
      which = pyro.sample("which", dist.Categorical(torch.ones(2, device=device) / 2))
      pyro.sample("y", dist.Normal(centers[which], 0.5), obs=y)

  def losses(model, guide, elbo, *data):
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), elbo)
    return [svi.step(*data) for _ in range(4)]

  pyro.clear_param_store()
  start = init_to_value(values={"slope": zero, "offset": zero})
  point = losses(line, AutoDelta(line, init_loc_fn=start), Trace_ELBO(), x, y)
  pyro.clear_param_store()
  drawn = losses(line, AutoNormal(line), Trace_ELBO(num_particles=2), x, y)
  pyro.clear_param_store()
  elbo = TraceEnum_ELBO(max_plate_nesting=1)
  enumerated = losses(mixture, lambda y: None, elbo, y)
  centers = pyro.param("centers").detach()
  kernel = HMC(line, step_size=0.05, num_steps=3, adapt_step_size=False)
  chain = MCMC(kernel, num_samples=4, warmup_steps=1, disable_progbar=True)
  chain.run(x, y)
  samples = chain.get_samples()["slope"]
  return {
    "point": point,
    "enumerated": enumerated,
    "centers": centers,
    "drawn": bool(torch.tensor(drawn).isfinite().all()),
    "chain": samples.shape == (4,) and samples.device.type == device,
  }
