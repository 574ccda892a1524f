"""Analysis of models: attributions by hooks, gradients per sample."""

import torch
from ecosystem.programs import program
from torch import nn


def _classifier(device):
  return nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
  ).to(device)


@program("captum: gradients, DeepLift, GradCAM, occlusion", library="captum")
def attributions(device):
  from captum import attr

  model = _classifier(device).eval()
  x = torch.randn(2, 1, 8, 8).to(device)
  base, mask = torch.zeros_like(x), torch.arange(64, device=device).view(1, 1, 8, 8)
  target = torch.tensor([0, 2], device=device)
  return {
    "saliency": attr.Saliency(model).attribute(x, target=target),
    "integrated": attr.IntegratedGradients(model).attribute(
      x, base, target=target, n_steps=8
    ),
    "deep lift": attr.DeepLift(model).attribute(x, base, target=target),
    "guided": attr.GuidedBackprop(model).attribute(x, target=target),
    "grad cam": attr.LayerGradCam(model, model[0]).attribute(x, target=target),
    "conductance": attr.LayerConductance(model, model[2]).attribute(
      x, base, target=target, n_steps=4
    ),
    "occlusion": attr.Occlusion(model).attribute(
      x, sliding_window_shapes=(1, 4, 4), strides=(1, 4, 4), target=target
    ),
    "ablation": attr.FeatureAblation(model).attribute(
      x, target=target, feature_mask=mask // 16
    ),
  }


@program("opacus: gradients per sample, clipping, a private loader", library="opacus")
def private_training(device):
  from opacus import GradSampleModule, PrivacyEngine
  from opacus.optimizers import DPOptimizer
  from torch.utils.data import DataLoader, TensorDataset

  x, y = torch.randn(4, 1, 8, 8).to(device), torch.tensor([0, 1, 2, 0]).to(device)
  model = GradSampleModule(_classifier(device))
  optimizer = DPOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    noise_multiplier=0.0,
    max_grad_norm=0.5,
    expected_batch_size=4,
  )
  nn.functional.cross_entropy(model(x), y).backward()
  samples = {name: p.grad_sample for name, p in model.named_parameters()}
  optimizer.step()
  weights = {name: p.detach() for name, p in model.named_parameters()}
  data = TensorDataset(torch.randn(16, 6), torch.arange(16) % 2)
  net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
  engine = PrivacyEngine()
  net, private, loader = engine.make_private(
    module=net,
    optimizer=torch.optim.Adam(net.parameters()),
    data_loader=DataLoader(data, batch_size=4),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
  )
  for images, labels in loader:
    private.zero_grad()
    loss = nn.functional.cross_entropy(net(images.to(device)), labels.to(device))
    loss.backward()
    private.step()
  return {
    **{f"gradient of {name}": value for name, value in samples.items()},
    **{f"new {name}": value for name, value in weights.items()},
    "budget": bool(engine.get_epsilon(1e-5) > 0),
    "finite": all(bool(p.isfinite().all()) for p in net.parameters()),
  }
