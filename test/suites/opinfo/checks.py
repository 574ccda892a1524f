"""Checks of one operator with one suggested input: CPU torch is the oracle.

Each check raises AssertionError, or the operator's error. An input that CPU torch
refuses raises `NotComparable`.
"""

from collections.abc import Callable

import torch
from opinfo.agreement import assert_agree, widened
from opinfo.special_cases import comparable, is_drawn, without_numbers
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import torchax
from torchax.interop import jax_jit, jax_value_and_grad
from torchax.tensor import Tensor


class NotComparable(Exception):
  """Error of an input that CPU torch refuses as well."""


class _Place:
  """Position of a tensor in the results of a compiled function."""


def tensors_of(tree) -> list[torch.Tensor]:
  return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_differentiable(tensor: torch.Tensor) -> bool:
  return tensor.is_floating_point() or tensor.is_complex()


def _copy_with_storage(tensor: torch.Tensor, device: str) -> torch.Tensor:
  """Copy a tensor; a view of part of its storage stays such a view of the copy."""
  tensor = tensor.detach()
  if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
    return tensor.clone().to(device)
  storage = tensor.untyped_storage()
  extent = storage.nbytes() // tensor.itemsize
  if tensor.is_contiguous() and extent == tensor.numel():
    return tensor.clone().to(device)
  whole = tensor.new_empty(0).set_(storage, 0, (extent,), (1,))
  return (
    whole.clone()
    .to(device)
    .as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
  )


def copied(tree, device: str, requires_grad=False, skip=()):
  """Copy the tensors of a tree as new leaves to a device; replace devices in it."""
  seen = {}

  def copy(value):
    if isinstance(value, torch.Tensor):
      if id(value) not in seen:
        moved = _copy_with_storage(value, device).detach()
        wanted = requires_grad and _is_differentiable(value) and id(value) not in skip
        seen[id(value)] = moved.requires_grad_(wanted)
      return seen[id(value)]
    if value == "cpu" or (isinstance(value, torch.device) and value.type == "cpu"):
      return torch.device(device)
    return value

  return pytree.tree_map(copy, tree)


def _parts(sample: SampleInput) -> tuple:
  return (sample.input, *sample.args), sample.kwargs


def _on_cpu(call: Callable):
  """Return the result of CPU torch."""
  torch.manual_seed(0)
  try:
    return call()
  except Exception as error:
    raise NotComparable(f"{type(error).__name__}: {error}") from error


def _exactly(call: Callable, parts, output=lambda result: result) -> Callable:
  """Return the result in double precision, if torch has it."""

  def compute():
    args, kwargs = widened(parts)
    torch.manual_seed(0)
    return output(call(*args, **kwargs))

  return compute


class Checks:
  """Checks of one operator.

  Args:
    name: name of the operator in `database`.
    op: its description.
    x64: 64-bit dtypes are kept.
  """

  def __init__(self, name: str, op: OpInfo, x64: bool):
    self.name, self.op, self.x64 = name, op, x64
    # Programs of calls that differ only in the numbers of their tensors.
    self._programs: dict[tuple, Callable] = {}

  def _agree(self, actual, expected, sample, exact) -> None:
    assert_agree(
      comparable(self.name, actual, sample),
      comparable(self.name, expected, sample),
      exact and (lambda: comparable(self.name, exact(), sample)),
      self.x64,
    )

  def _expected(self, call: Callable, sample: SampleInput):
    args, kwargs = copied(_parts(sample), "cpu")
    return _on_cpu(lambda: call(*args, **kwargs))

  def forward(self, sample: SampleInput) -> None:
    """Compare values, shapes and dtypes of the results."""
    expected = self._expected(self.op, sample)
    args, kwargs = copied(_parts(sample), "jax")
    torch.manual_seed(0)
    with torchax.default_env():
      actual = self.op(*args, **kwargs)
    self._agree(actual, expected, sample, _exactly(self.op, _parts(sample)))

  def jit(self, sample: SampleInput) -> None:
    """Compare them in a function compiled by `jax_jit`."""
    expected = self._expected(self.op, sample)
    args, kwargs = copied(_parts(sample), "jax")
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def run(*tensors):
      rest = iter(tensors)
      filled = [next(rest) if isinstance(v, Tensor) else v for v in leaves]
      args, kwargs = pytree.tree_unflatten(filled, spec)
      result = self.op(*args, **kwargs)
      # Results of torch other than tensors are known while tracing.
      others.append(pytree.tree_map_only(Tensor, lambda _: _Place(), result))
      return tensors_of(result)

    others = []
    torch.manual_seed(0)
    with torchax.default_env():
      actual = jax_jit(run)(*tensors_of(leaves))
    rest = iter(actual)
    filled = pytree.tree_map_only(_Place, lambda _: next(rest), others[-1])
    self._agree(filled, expected, sample, _exactly(self.op, _parts(sample)))

  def gradient(self, sample: SampleInput) -> None:
    """Compare gradients of all inputs that torch differentiates, by eager autograd."""
    skip, (expected, _) = self._cpu_gradient(sample)
    torch.manual_seed(0)
    with torchax.default_env():
      actual = self._gradients(sample, "jax", skip)[0]
    self._gradients_agree(actual, expected, sample, skip)

  def jax_gradient(self, sample: SampleInput) -> None:
    """Compare gradients by `jax_value_and_grad`, compiled."""
    skip, (expected, weights) = self._cpu_gradient(sample)
    call = DifferentiatedCall(self.op, sample, skip, weights)
    program = self._programs.setdefault(call.key, call.compiled())
    torch.manual_seed(0)
    with torchax.default_env():
      actual = call.gradients(program)
    actual = [
      None if want is None and not have.any() else have
      for have, want in zip(actual, expected, strict=True)
    ]
    self._gradients_agree(actual, expected, sample, skip)

  def _gradients_agree(self, actual, expected, sample, skip) -> None:
    if is_drawn(self.name, sample):
      actual, expected = without_numbers(actual), without_numbers(expected)
    exact = _exactly_gradient(self, sample, skip)
    assert_agree(actual, expected, exact, self.x64)

  def _cpu_gradient(self, sample):
    """Return the gradients and the inputs that torch refuses to differentiate."""
    skip = set()
    parts = tensors_of(_parts(sample))
    while True:
      try:
        torch.manual_seed(0)
        return skip, self._gradients(sample, "cpu", skip)
      except Exception as error:
        refused = _refused(error, parts, skip)
        if refused is None:
          raise NotComparable(f"{type(error).__name__}: {error}") from error
        skip.add(id(refused))

  def _gradients(self, sample, device, skip, parts=None):
    """Return gradients of a fixed weighting of the results, and its weights."""
    args, kwargs = copied(parts or _parts(sample), device, True, skip)
    result = sample.output_process_fn_grad(self.op(*args, **kwargs))
    results = enumerate(tensors_of(result))
    outputs = {place: tensor for place, tensor in results if tensor.requires_grad}
    leaves = [leaf for leaf in tensors_of((args, kwargs)) if leaf.requires_grad]
    if not outputs:
      raise NotComparable("no result is differentiable")
    drawn = [_weights(output, seed) for seed, output in enumerate(outputs.values())]
    found = torch.autograd.grad(
      list(outputs.values()), leaves, drawn, allow_unused=True
    )
    return found, dict(zip(outputs, drawn))

  def in_place(self, sample: SampleInput) -> None:
    """Compare the in-place variant: it changes its input or raises as torch does."""
    self._changes(sample, self.op.inplace_variant)

  def _changes(self, sample, variant) -> None:
    args, kwargs = copied(_parts(sample), "cpu")
    torch.manual_seed(0)
    try:
      variant(*args, **kwargs)
    except Exception as error:
      self._refuses(sample, variant, error)
      return
    expected = args[0]
    args, kwargs = copied(_parts(sample), "jax")
    torch.manual_seed(0)
    with torchax.default_env():
      returned = variant(*args, **kwargs)
    assert returned is args[0], "the in-place variant does not return its input"
    exact = _exactly(variant, _parts(sample))
    self._agree(args[0], expected, sample, exact)

  def _refuses(self, sample, call, error: Exception) -> None:
    with torchax.default_env():
      try:
        args, kwargs = copied(_parts(sample), "jax")
        call(*args, **kwargs)
      except Exception as ours:
        assert_same_refusal(ours, error)
        return
    raise AssertionError(f"CPU torch raises {type(error).__name__}: {error}")

  def out(self, sample: SampleInput) -> None:
    """Compare `out=`, which is filled and returned; one without elements is resized."""
    shapes = self._expected(self.op, sample)

    def into(device, args, kwargs):
      given = pytree.tree_map_only(
        torch.Tensor, lambda t: torch.zeros_like(t, device=device), shapes
      )
      torch.manual_seed(0)
      returned = self.op(*args, **kwargs, out=given)
      for have, out in zip(tensors_of(returned), tensors_of(given)):
        assert have is out or have.is_set_to(out), "what is returned is not `out`"
      return given

    args, kwargs = copied(_parts(sample), "cpu")
    expected = _on_cpu(lambda: into("cpu", args, kwargs))
    args, kwargs = copied(_parts(sample), "jax")
    with torchax.default_env():
      actual = into("jax", args, kwargs)
    self._agree(actual, expected, sample, _exactly(self.op, _parts(sample)))

  def error(self, error_input) -> None:
    """Assert that jax raises where torch does."""
    sample = error_input.sample_input
    try:
      args, kwargs = copied(_parts(sample), "cpu")
    except NotImplementedError as error:
      raise NotComparable("a tensor on meta has no numbers to copy") from error
    try:
      self.op(*args, **kwargs)
    except Exception as error:
      self._refuses(sample, self.op, error)
      return
    raise NotComparable("CPU torch takes it")


def assert_same_refusal(ours: Exception, theirs: Exception) -> None:
  """Assert that our error has torch's class."""
  assert isinstance(ours, type(theirs)), (
    f"{type(ours).__name__} ({ours}) instead of {type(theirs).__name__} ({theirs})"
  )


class DifferentiatedCall:
  """Call of an operator whose gradients JAX takes.

  Args:
    op: the operator.
    sample: arguments of the call.
    skip: ids of tensors that are held constant.
    weights: weights of the resulting tensors that are differentiated, by position.
  """

  def __init__(self, op: OpInfo, sample: SampleInput, skip: set, weights: dict):
    leaves, self._spec = pytree.tree_flatten(_parts(sample))
    self._op, self._outputs = op, sample.output_process_fn_grad
    self._weights = {str(place): copied(w, "jax") for place, w in weights.items()}
    self._leaves = copied(leaves, "jax")
    # A repeated tensor is one operand.
    first = {id(leaf): place for place, leaf in reversed(list(enumerate(leaves)))}
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    wanted = [t for t in tensors if _is_differentiable(t) and id(t) not in skip]
    self._asked = [first[id(tensor)] for tensor in wanted]
    self._origin = [first[id(leaf)] for leaf in leaves]
    self._tensors = sorted({first[id(tensor)] for tensor in tensors})

  @property
  def key(self) -> tuple:
    """Key, equal for calls that one program computes."""
    numbers = [leaf for leaf in self._leaves if not isinstance(leaf, torch.Tensor)]
    # Its structure is part of the origins: slices among the numbers have no hash.
    return (
      *(repr(numbers), repr(self._spec), self._outputs),
      *(tuple(self._asked), tuple(self._origin), tuple(self._weights)),
    )

  def compiled(self) -> Callable:
    """Program of the differentiated tensors, the other tensors and the weights."""

    def weighted(wanted, rest, weights):
      given = wanted | rest
      filled = [
        given.get(str(place), leaf) for place, leaf in zip(self._origin, self._leaves)
      ]
      args, kwargs = pytree.tree_unflatten(filled, self._spec)
      results = tensors_of(self._outputs(self._op(*args, **kwargs)))
      total = 0.0
      for place, weight in weights.items():
        product = results[int(place)] * weight.conj()
        total = total + (product.real if product.is_complex() else product).sum()
      return total

    return jax_jit(jax_value_and_grad(weighted))

  def gradients(self, program: Callable) -> list[Tensor]:
    """Return torch's gradients, one for each differentiated tensor."""
    wanted = {str(place): self._leaves[place] for place in self._asked}
    rest = {
      str(place): self._leaves[place]
      for place in self._tensors
      if place not in self._asked
    }
    _, found = program(wanted, rest, self._weights)
    # JAX's gradient by a complex number is the conjugate of torch's.
    return [found[str(place)].conj().resolve_conj() for place in self._asked]


def _exactly_gradient(checks: Checks, sample, skip) -> Callable:
  def compute():
    leaves, spec = pytree.tree_flatten(_parts(sample))
    wide = [widened(leaf) for leaf in leaves]
    wide_skip = {id(w) for leaf, w in zip(leaves, wide) if id(leaf) in skip}
    torch.manual_seed(0)
    parts = pytree.tree_unflatten(wide, spec)
    return checks._gradients(sample, "cpu", wide_skip, parts)[0]

  return compute


def _weights(output: torch.Tensor, seed: int) -> torch.Tensor:
  """Return fixed numbers in [0, 1) that bfloat16 holds, in the output's dtype."""
  generator = torch.Generator().manual_seed(seed)
  drawn = torch.rand(output.shape, generator=generator, device="cpu")
  return drawn.bfloat16().to(output.dtype).to(output.device)


def _refused(error: Exception, parts, skip):
  """Return the next input to hold constant, if torch reports one without derivative."""
  if "not differentiable with respect to argument" not in str(error):
    return None
  rest = [t for t in parts if _is_differentiable(t) and id(t) not in skip]
  return rest[-1] if len(rest) > 1 else None
