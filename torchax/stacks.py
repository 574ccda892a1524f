"""Stacks of equal layers, run by a loop that is compiled for one layer.

`ScannedModule` is such a loop. `scan_layers` finds the stacks in a model and replaces
each by a `LayerStack`. `torchax.train` exports both.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from torchax.compat import torch_compat
from torchax.core.bounded_cache import BoundedCache
from torchax.core.partitions import Partition
from torchax.interop import gradient_checkpoint, jax_jit, scan


class Container:
  """Holder of a module, which hides it from the parent's list of submodules."""

  one_mod: torch.nn.Module


# Per module; it has one body for each structure of its arguments.
MOST_BODIES = 64


class ScannedModule(torch.nn.Module):
  """Stack of equal layers, run by a loop that is compiled for one layer.

  Compile time does not grow with the depth. The tensors of the layers are stacked: a
  parameter `weight` of shape (…) becomes one of shape (layers, …) in `params`. In the
  order mode of `torchax.rng.address_by`, dropouts draw the numbers of the unrolled
  stack; in the site mode all layers are one site.

  Args:
    module_list: layers of equal structure. The first argument of a layer is its input,
      and its result is the input of the next; all other arguments go to every layer.
    checkpoint_policy: policy of `jax.checkpoint`, or its name, such as "dots_saveable".
      The backward pass then recomputes all values that the policy does not save.

  Raises:
    ValueError: there are no layers, their tensors differ in name, shape or dtype, or
      the policy does not exist.

  >>> layers = [torch.nn.Linear(2, 2).to("jax") for _ in range(3)]
  >>> stack = ScannedModule(layers)
  >>> stack.params["weight"].shape, stack(torch.ones(1, 2, device="jax")).shape
  (torch.Size([3, 2, 2]), torch.Size([1, 2]))
  """

  def __init__(
    self,
    module_list: Sequence[torch.nn.Module],
    checkpoint_policy: str | Callable | None = None,
  ):
    super().__init__()
    layers = list(module_list)
    if not layers:
      raise ValueError("ScannedModule expects at least one layer, but got none.")
    self.c = Container()
    self.c.one_mod = layers[0]
    self.checkpoint_policy = policy_of(checkpoint_policy)
    self._count = len(layers)
    self._bodies: BoundedCache[Any, Callable] = BoundedCache(MOST_BODIES)
    stacked = self._stack_layer_weights(layers)
    parameters = {name for name, _ in layers[0].named_parameters()}
    self.params = torch.nn.ParameterDict(
      {
        self._param_name_new(name): torch.nn.Parameter(tensor, trained)
        for name, (tensor, trained) in stacked.items()
        if name in parameters
      }
    )
    self._layer_buffers = [name for name in stacked if name not in parameters]
    for name in self._layer_buffers:
      self.register_buffer(self._param_name_new(name), stacked[name][0])

  def _param_name_new(self, old: str) -> str:
    """Return the key of a layer's tensor in a ParameterDict, which allows no dots."""
    return "___".join(old.split("."))

  def _param_name_old(self, new: str) -> str:
    """Invert `_param_name_new`."""
    return ".".join(new.split("___"))

  def _stack_layer_weights(self, module_list) -> dict[str, tuple[torch.Tensor, bool]]:
    """Return by name: tensors of shape (layers, …) and their `requires_grad`."""
    tables = [
      {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
      for layer in module_list
    ]
    for number, table in enumerate(tables):
      kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in table.items()}
      first = {name: (tensor.shape, tensor.dtype) for name, tensor in tables[0].items()}
      different = {n for n in {*kinds, *first} if kinds.get(n) != first.get(n)}
      if different:
        raise ValueError(
          f"The layers of ScannedModule have one structure, but layer {number} differs "
          f"from the first in {sorted(different)}."
        )
    with torch.no_grad():
      return {
        name: (torch.stack([table[name] for table in tables]), tensor.requires_grad)
        for name, tensor in tables[0].items()
      }

  def train(self, mode: bool = True) -> "ScannedModule":
    """Set the mode of this module and of the layers.

    Args:
      mode: True for training, False for evaluation.

    Returns:
      The module itself.

    >>> stack = ScannedModule([torch.nn.Dropout(0.5) for _ in range(3)])
    >>> x = torch.ones(2, device="jax")
    >>> stack.train(False)(x)
    tensor([1., 1.], device='jax:0')
    """
    self.c.one_mod.train(mode)
    return super().train(mode)

  def forward(self, *args: Any, **kwargs: Any) -> Any:
    """Run all layers; takes the arguments of one layer.

    Args:
      *args: input of the first layer, then arguments for every layer.
      **kwargs: more arguments for every layer.

    Returns:
      The result of the last layer.

    Raises:
      TypeError: there is no positional argument.

    >>> layers = [torch.nn.Softplus() for _ in range(2)]
    >>> x = torch.zeros(1, device="jax")
    >>> torch.equal(ScannedModule(layers)(x), layers[1](layers[0](x)))
    True
    """
    if not args:
      raise TypeError(
        "ScannedModule needs the input of the first layer as an argument."
      )
    others = Partition((args[1:], kwargs))
    stacked = {self._param_name_old(name): t for name, t in self.params.items()}
    for name in self._layer_buffers:
      stacked[name] = getattr(self, self._param_name_new(name))
    body = self._bodies.get(others)
    if body is None:
      static = others.without_arrays()
      body = self._bodies[static] = functools.partial(self._run_layer, static)
    carry = (args[0], others.dynamic)
    (result, _), buffers = scan(body, carry, stacked, length=self._count)
    with torch.no_grad():
      for name, updated in buffers.items():
        getattr(self, self._param_name_new(name)).copy_(updated)
    return result

  def next_input(self, result: Any) -> Any:
    """Return the next layer's input; a subclass may select a part of the result.

    Args:
      result: result of a layer.
    """
    return result

  def _run_layer(self, arguments: Partition, carry, tensors):
    value, others = carry
    args, kwargs = arguments.unflatten(others)

    def layer(value, tensors):
      with torch_compat.reparametrize(self.c.one_mod, tensors):
        result = self.next_input(self.c.one_mod(value, *args, **kwargs))
      return result, {name: tensors[name] for name in self._layer_buffers}

    if self.checkpoint_policy is not None:
      layer = gradient_checkpoint(layer, {"policy": self.checkpoint_policy})
    result, buffers = layer(value, tensors)
    return (result, others), buffers


# Finding the stacks of a model --------------------------------------------------------


class LayerStack(ScannedModule):
  """Stack that replaces equal neighbours in a list of modules.

  It takes the index of the first layer. State dicts keep the names of the layers.

  Args:
    layers: the modules.
    names: keys of the layers in their list.
    unpacks: True if layers return a tuple whose first value is the next one's input.
    checkpoint_policy: see `ScannedModule`.

  >>> stack = LayerStack([torch.nn.Linear(2, 2) for _ in range(3)], "012", False, None)
  >>> stack.params["bias"].shape
  torch.Size([3, 2])
  """

  def __init__(
    self,
    layers: Sequence[torch.nn.Module],
    names: Sequence[str],
    unpacks: bool,
    checkpoint_policy: str | Callable | None,
  ):
    super().__init__(layers, checkpoint_policy)
    self._names = tuple(names)
    self._unpacks = unpacks
    self.train(layers[0].training)
    self.register_state_dict_post_hook(_unstack)
    self._others: list = []

  def __getattr__(self, name: str):
    """Look up other attributes on the first layer; models read a layer's attributes."""
    try:
      return super().__getattr__(name)
    except AttributeError:
      if "_others" not in self.__dict__:  # during __init__, or a copy
        raise
      return getattr(self.c.one_mod, name)

  def tensor_names(self) -> dict[str, str]:
    """Return the names of a layer's tensors, by the names of the stacked tensors.

    >>> layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    >>> LayerStack(layers, "012", False, None).tensor_names()
    {'params.bias': 'bias', 'params.weight': 'weight'}
    """
    names = {f"params.{name}": self._param_name_old(name) for name in self.params}
    names.update({self._param_name_new(name): name for name in self._layer_buffers})
    return names

  def forward(self, *args: Any, **kwargs: Any) -> Any:
    """Run all layers; takes the arguments and returns the result of one layer.

    Args:
      *args, **kwargs: as for `ScannedModule.forward`.
    """
    result = super().forward(*args, **kwargs)
    return (result, *self._others) if self._unpacks else result

  def next_input(self, result: Any) -> Any:
    if not self._unpacks:
      return result
    first, *self._others = result
    if any(other is not None for other in self._others):
      raise ValueError(
        f"A layer of {type(self.c.one_mod).__name__} gives {1 + len(self._others)} "
        "values, of which a loop over layers keeps the first. Turn off what the others "
        "are for (`output_attentions`, `use_cache`), or leave the layers as they are."
      )
    return first


def _unstack(stack: LayerStack, state: dict, prefix: str, _) -> None:
  """Replace the stacked tensors of a state dict by those of the layers."""
  parent = prefix.removesuffix(f"{stack._names[0]}.")
  for stacked, name in stack.tensor_names().items():
    tensor = state.pop(prefix + stacked, None)
    if tensor is not None:
      for layer, part in zip(stack._names, tensor.unbind()):
        state[f"{parent}{layer}.{name}"] = part


def _restack(parent: torch.nn.Module, state: dict, prefix: str, *_) -> None:
  """Stack the tensors of layers in a state dict that is loaded into their list."""
  for key, stack in parent.named_children():
    if not isinstance(stack, LayerStack):
      continue
    for stacked, name in stack.tensor_names().items():
      names = [f"{prefix}{layer}.{name}" for layer in stack._names]
      if all(name in state for name in names):
        tensors = [state.pop(name) for name in names]
        state[f"{prefix}{key}.{stacked}"] = torch.stack(tensors)


@dataclasses.dataclass
class _Call:
  """Arguments and result of one call of a layer."""

  args: tuple
  kwargs: dict
  result: Any = None


def _same(first, second) -> bool:
  """Compare two values: tensors by identity, everything else by equality."""
  if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
    return first is second
  if isinstance(first, tuple | list) and type(first) is type(second):
    return len(first) == len(second) and all(map(_same, first, second))
  if isinstance(first, dict) and isinstance(second, dict):
    return first.keys() == second.keys() and all(
      _same(value, second[name]) for name, value in first.items()
    )
  return first is second or bool(first == second)


def _first(result):
  return result[0] if isinstance(result, tuple) and result else None


def _why_no_stack(calls: Sequence[list[_Call]]) -> str | None:
  """Return the reason why layers called like this are no stack; None if they are."""
  if any(len(made) != 1 for made in calls):
    return "each layer of a stack is called once"
  made = [each[0] for each in calls]
  if any(not call.args for call in made):
    return "the input of a layer has to be its first positional argument"
  for before, after in zip(made, made[1:]):
    value = after.args[0]
    if value is not before.result and value is not _first(before.result):
      return "the input of a layer is not the result of the one before it"
    if not _same(before.args[1:], after.args[1:]):
      return "the layers are called with different further arguments"
    different = {
      name
      for name in {*before.kwargs, *after.kwargs}
      if not _same(before.kwargs.get(name), after.kwargs.get(name))
    }
    if different:
      return f"the layers are called with different {', '.join(sorted(different))}"
  return None


def _structure(layer: torch.nn.Module) -> tuple:
  tensors = (*layer.named_parameters(), *layer.named_buffers())
  modules = tuple((name, type(module)) for name, module in layer.named_modules())
  return modules, tuple((name, t.shape, t.dtype) for name, t in tensors)


def _candidates(model: torch.nn.Module) -> dict[str, list[list[str]]]:
  """Return runs of two or more equal neighbours, by the name of their list of modules.

  A `ModuleList` of layers that are not all equal has no runs.
  """
  runs_by_list: dict[str, list[list[str]]] = {}
  for name, module in model.named_modules():
    if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
      continue
    runs: list[list[str]] = []
    last = None
    for key, layer in module.named_children():
      structure = _structure(layer)
      if runs and structure == last and structure[1]:
        runs[-1].append(key)
      else:
        runs.append([key])
      last = structure
    if isinstance(module, torch.nn.ModuleList) and len(runs) > 1:
      runs_by_list[name] = []  # the model iterates over the other layers, too
    elif any(len(run) > 1 for run in runs):
      runs_by_list[name] = [run for run in runs if len(run) > 1]
  return runs_by_list


def _calls(model, layers, args, kwargs) -> dict[torch.nn.Module, list[_Call]]:
  """Trace a model once, without computing; return the calls of its layers."""
  calls: dict[torch.nn.Module, list[_Call]] = {layer: [] for layer in layers}

  def before(layer, args, kwargs):
    calls[layer].append(_Call(args, kwargs))

  def after(layer, args, kwargs, result):
    calls[layer][-1].result = result

  hooks = []
  for layer in calls:
    hooks.append(layer.register_forward_pre_hook(before, with_kwargs=True))
    hooks.append(layer.register_forward_hook(after, with_kwargs=True))

  def run(*args, **kwargs):
    for made in calls.values():  # tracing may run the model more than once
      made.clear()
    return model(*args, **kwargs)

  try:
    jax_jit(run).trace(*args, **kwargs)
  finally:
    for hook in hooks:
      hook.remove()
  return calls


def scan_layers(
  model: torch.nn.Module,
  *args: Any,
  policy: str | Callable | None = None,
  **kwargs: Any,
) -> torch.nn.Module:
  """Replace the stacks of equal layers in a model by loops, each compiled once.

  The compile time of the model then does not grow with its depth. A stack consists of
  two or more neighbours of equal structure in a `ModuleList` or `Sequential`. Each is
  called once, with the result of its predecessor and otherwise the same arguments. One
  trace of the model, without computation or draws, finds them.

  A `LayerStack` replaces the first layer of a stack; the other layers are removed from
  the list. `state_dict` and `load_state_dict` keep the names of the tensors. Create the
  optimizer afterwards.

  Args:
    model: module on jax; it is changed in place.
    *args, **kwargs: example arguments of the model; only their shapes count. Turn off
      caches and results of single layers (`use_cache=False`).
    policy: policy of `jax.checkpoint`, or its name, such as "dots_saveable" or
      "nothing_saveable". The backward pass then recomputes all values that the policy
      does not save. "offload_dots" saves results of matrix products in host memory.

  Returns:
    The model.

  Raises:
    ValueError: the model has no stack (the message gives the reason for each list of
      equal layers), or the policy does not exist.

  >>> layers = [torch.nn.Linear(2, 2) for _ in range(3)]
  >>> model = torch.nn.Sequential(*layers).to("jax")
  >>> [type(m).__name__ for m in scan_layers(model, torch.ones(1, 2, device="jax"))]
  ['LayerStack']
  """
  stacks, reasons = _find_stacks(model, args, kwargs, policy_of(policy))
  if not stacks:
    reason = "; ".join(reasons) or "no ModuleList or Sequential has equal neighbours"
    raise ValueError(
      f"{type(model).__name__} has no stack of layers to scan: {reason}. Write a stack "
      "as `for layer in self.layers: x = layer(x, …)`, or use `ScannedModule`."
    )
  for name in {name for name, _, _ in stacks}:
    model.get_submodule(name).register_load_state_dict_pre_hook(_restack)
  for name, run, stack in stacks:
    parent = model.get_submodule(name)
    parent._modules[run[0]] = stack
    for key in run[1:]:
      del parent._modules[key]
  return model


def _find_stacks(model: torch.nn.Module, args, kwargs, policy) -> tuple[list, list]:
  """Return stacks as (name of list, keys in it, stack), and reasons against others."""
  lists = _candidates(model)
  runs = [(name, run) for name, list_runs in lists.items() for run in list_runs]
  layers = {
    (name, key): model.get_submodule(f"{name}.{key}" if name else key)
    for name, run in runs
    for key in run
  }
  calls = _calls(model, layers.values(), args, kwargs) if runs else {}
  reasons = [f"{name}: its layers differ" for name in lists if not lists[name]]
  stacks = []
  for name, run in runs:
    of_run = [layers[name, key] for key in run]
    reason = _why_no_stack([calls[layer] for layer in of_run])
    if reason is None:
      unpacks = calls[of_run[0]][0].result is not calls[of_run[1]][0].args[0]
      stacks.append((name, run, LayerStack(of_run, run, unpacks, policy)))
    else:
      reasons.append(f"{name or type(model).__name__}: {reason}")
  return stacks, reasons


# Policies -----------------------------------------------------------------------------

_POLICIES = (
  "checkpoint_dots",
  "checkpoint_dots_with_no_batch_dims",
  "dots_saveable",
  "dots_with_no_batch_dims_saveable",
  "everything_saveable",
  "nothing_saveable",
)


def policy_of(policy: str | Callable | None) -> Callable | None:
  """Return the policy of `jax.checkpoint` with a name; pass through None and functions.

  Args:
    policy: a policy in `jax.checkpoint_policies` without arguments, or "offload_dots"
      for `offload_dot_with_no_batch_dims` from the device to pinned host memory.

  Raises:
    ValueError: no policy has that name, or the device has no pinned host memory.

  >>> policy_of("dots_saveable") is jax.checkpoint_policies.dots_saveable
  True
  """
  if not isinstance(policy, str):
    return policy
  if policy in _POLICIES:
    return getattr(jax.checkpoint_policies, policy)
  if policy != "offload_dots":
    raise ValueError(
      f"There is no policy {policy!r}: expected one of {', '.join(_POLICIES)}, "
      "offload_dots, or a function such as those of jax.checkpoint_policies."
    )
  kinds = {memory.kind for memory in jax.local_devices()[0].addressable_memories()}
  if "pinned_host" not in kinds:
    raise ValueError(
      f"{jax.local_devices()[0]} has no pinned memory of the host to offload to, only "
      f"{', '.join(sorted(kinds))}. Take another policy, such as 'dots_saveable'."
    )
  return jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
