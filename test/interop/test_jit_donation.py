"""Donation of a tensor's memory leaves other tensors of torch intact."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax.interop import jax_jit

NUMBERS = [1.0, 2.0, 3.0, 4.0]


def _zeros() -> torch.Tensor:
  return torch.zeros(4).to("jax")


def _copied(x):
  return _zeros().copy_(x)


def _assigned(x):
  target = _zeros()
  target[:] = x
  return target


def _into_out(x):
  return torch.cat([x], out=_zeros())


def _loaded(x):
  module = torch.nn.BatchNorm1d(4, affine=False).to("jax")
  module.load_state_dict({"running_mean": x}, strict=False)
  return module.running_mean


def _gradient(x):
  leaf = torch.nn.Parameter(_zeros())
  (leaf * 1).backward(x)
  return leaf.grad


def _momentum(x):
  leaf = torch.nn.Parameter(_zeros())
  optimizer = torch.optim.SGD([leaf], lr=1.0, momentum=0.9)
  leaf.grad = x
  optimizer.step()
  return optimizer.state[leaf]["momentum_buffer"]


def _averaged(x):
  module = torch.nn.Module()
  module.weight = torch.nn.Parameter(x)
  return torch.optim.swa_utils.AveragedModel(module).module.weight.detach()


def _data(x):
  with torchax.default_env(), pytest.warns(UserWarning, match="copy construct"):
    return torch.tensor(x)


INDEPENDENT = {
  "deepcopy": copy.deepcopy,
  "deepcopy of a view": lambda x: copy.deepcopy(x[None])[0],
  "deepcopy of a module": _averaged,
  "pickle": lambda x: pickle.loads(pickle.dumps(x)),
  "clone": torch.clone,
  "jitted clone": jax_jit(torch.clone),
  "to": lambda x: x.to("jax", copy=True),
  "to a dtype": lambda x: x.to(torch.float32, copy=True),
  "new_tensor": lambda x: x.new_tensor(x),
  "tensor": _data,
  "asarray": lambda x: torch.asarray(x, copy=True),
  "copy_": _copied,
  "setitem": _assigned,
  "out": _into_out,
  "load_state_dict": _loaded,
  "gradient": _gradient,
  "momentum": _momentum,
  "numpy": lambda x: torch.from_numpy(x.numpy()),
  "dlpack": torch.from_dlpack,
  "cpu": lambda x: x.cpu(),
  "add 0": lambda x: x + 0,
  "abs": torch.abs,
  "cat": lambda x: torch.cat([x]),
  "contiguous": lambda x: x.expand(2, 4).contiguous()[0],
  "repeat": lambda x: x.repeat(1),
  "sum": lambda x: x[None].sum(0),
  "flip": lambda x: x.flip(()),
  "pad": lambda x: F.pad(x, (0, 0)),
  "view_copy": lambda x: torch.view_copy(x, (4,)),
  "foreach": lambda x: torch._foreach_add([x], 0)[0],
}


_doubling = jax_jit(lambda x: x.mul_(2).sum(), {"donate_argnums": 0})


@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_copied_tensor_outlives_its_source(name):
  source = torch.tensor(NUMBERS).to("jax")
  result = INDEPENDENT[name](source)
  array = source.jax()
  _doubling(source)
  assert array.is_deleted()  # else the test is empty
  assert result.tolist() == NUMBERS
  assert source.tolist() == [2 * number for number in NUMBERS]


@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_source_outlives_the_tensor_built_from_it(name):
  source = torch.tensor(NUMBERS).to("jax")
  result = INDEPENDENT[name](source).to("jax")
  _doubling(result)
  assert source.tolist() == NUMBERS
