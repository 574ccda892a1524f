"""Programs that load weights shard by shard and free them, as inference engines do."""

import pathlib
import tempfile

import torch
from ecosystem.programs import program
from torch import nn

F = nn.functional


class Fused(nn.Module):
  """Linear layer whose weight is filled from shards; the parameter has a loader."""

  def __init__(self, width: int, parts: tuple[str, ...]):
    super().__init__()
    self.parts, self.width = parts, width
    self.weight = nn.Parameter(
      torch.empty(width * len(parts), width), requires_grad=False
    )
    self.weight.weight_loader = self.load

  def load(self, parameter, loaded, part: str):
    at = self.parts.index(part) * self.width
    parameter.data.narrow(0, at, self.width).copy_(loaded)

  def process_weights_after_loading(self):
    """Replace the weight by its transpose and free the old memory."""
    old = self.weight
    self.kernel = nn.Parameter(old.data.t().contiguous(), requires_grad=False)
    del self.weight

  def forward(self, x):
    return x @ self.kernel


@program("weights by parts: safetensors, loaders on parameters, processing after")
def weights_by_parts(device):
  from safetensors import safe_open
  from safetensors.torch import save_file

  width, parts = 8, ("q_proj", "k_proj", "v_proj")
  with tempfile.TemporaryDirectory() as folder:
    for shard, part in enumerate(parts):
      name = f"layers.0.attn.{part}.weight"
      weight = torch.randn(width, width).to(torch.bfloat16)
      save_file({name: weight}, f"{folder}/model-{shard}.safetensors")
    with torch.device(device):
      model = nn.ModuleDict({"attn": Fused(width, parts)})
    names = dict(model.named_parameters())
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
      with safe_open(str(path), framework="pt") as opened:
        names_of_shard = opened.keys()
        for name in names_of_shard:
          part = next(part for part in parts if part in name)
          target = names["attn.weight"]
          target.weight_loader(target, opened.get_tensor(name).float(), part)
  for module in model.modules():
    if hasattr(module, "process_weights_after_loading"):
      module.process_weights_after_loading()
  with torch.inference_mode():
    q, k, v = model["attn"](torch.ones(1, 4, width, device=device)).chunk(3, dim=-1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
  return {"kernel": model["attn"].kernel, "out": out}


@program(
  "weights as arrays: t2j, j2t, functional_call, freed storage",
  lines=6,
)
def weights_as_arrays(device):
  model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
  x = torch.randn(3, 8)
  if device == "cpu":
    return {"out": model(x), "freed": True}
  import jax

  from torchax.interop import jax_jit, jax_view, torch_view
  from torchax.ops.mappings import j2t, t2j

  weights, freed = {}, True
  for name, parameter in model.named_parameters():
    held = parameter.detach().clone()
    weights[name] = torch_view(t2j(held, use_dlpack=False))
    held.untyped_storage().resize_(0)
    freed &= held.untyped_storage().size() == 0

  @jax_jit
  def run(weights, x):
    return torch.func.functional_call(model, weights, (x,))

  out = run(weights, torch_view(t2j(x, use_dlpack=False)))
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  moved = jax.device_put(jax_view(out), sharding)
  return {"out": j2t(moved), "freed": freed}
