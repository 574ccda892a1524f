"""Laws of functional collectives on eight devices; `ops/test_jc10d.py` runs them.

usage:
  XLA_FLAGS=--xla_force_host_platform_device_count=8 python collective_cases.py out.json

`torch.distributed` defines the laws. numpy computes the expected results from the
tensors of the members: row i of `ROWS` is the tensor of member i of the axis "tp".
"""

import contextlib
import functools
import warnings
from collections.abc import Callable

import jax
import many_devices
import numpy as np
import pytest
import torch
import torch.distributed._functional_collectives as functional
from jax.sharding import AxisType, Mesh, PartitionSpec

import torchax
from torchax.errors import CollectiveError
from torchax.interop import fori_loop, jax_jit, jax_shard_map, jax_vmap
from torchax.ops import jc10d

CASES: dict[str, Callable] = {}

MEMBERS = 4
ROWS = np.random.default_rng(0).uniform(0.5, 2.0, (MEMBERS, 8, 3)).astype(np.float32)
INTEGERS = np.array([[5, 0], [3, 7], [12, 1], [9, 4]], np.int32)[:, :, None]
WEIGHTS = np.random.default_rng(1).normal(size=(MEMBERS, 32, 3)).astype(np.float32)
ops = torch.ops._c10d_functional


def case(function: Callable) -> Callable:
  """Register a law."""
  CASES[function.__name__] = function
  return function


_kind = [AxisType.Auto]


@contextlib.contextmanager
def axes_of(kind: AxisType):
  """Make axes of this kind in `mesh` inside the block."""
  _kind.append(kind)
  try:
    yield
  finally:
    _kind.pop()


KINDS = {
  kind.name.lower(): functools.partial(axes_of, kind)
  for kind in (AxisType.Auto, AxisType.Explicit)
}


def mesh() -> Mesh:
  devices = np.array(jax.devices()).reshape(2, MEMBERS)
  return Mesh(devices, ("dp", "tp"), axis_types=(_kind[-1],) * 2)


def on_members(function: Callable) -> Callable:
  """Map a function of one member's tensor to a function of all, stacked."""

  def of_one(stacked):
    return function(stacked[0])[None]

  spec = PartitionSpec("tp")
  return jax_shard_map(of_one, mesh=mesh(), in_specs=spec, out_specs=spec)


def found(function: Callable, rows: np.ndarray = ROWS) -> np.ndarray:
  """Return the results of all members, stacked."""
  tensor = torch.tensor(rows).to("jax")
  return jax_jit(on_members(function))(tensor).cpu().numpy()


def for_all(result: np.ndarray) -> np.ndarray:
  return np.broadcast_to(result, (MEMBERS, *result.shape))


# Name of the reduction -> (rows, reduction in numpy).
REDUCTIONS = {
  "sum": (ROWS, lambda rows: rows.sum(0)),
  "avg": (ROWS, lambda rows: rows.mean(0)),
  "product": (ROWS, lambda rows: rows.prod(0)),
  "min": (ROWS, lambda rows: rows.min(0)),
  "max": (ROWS, lambda rows: rows.max(0)),
  "band": (INTEGERS, np.bitwise_and.reduce),
  "bor": (INTEGERS, np.bitwise_or.reduce),
  "bxor": (INTEGERS, np.bitwise_xor.reduce),
}


def _enter_reductions() -> None:
  for name, (rows, law) in REDUCTIONS.items():

    def reduces(name=name, rows=rows, law=law):
      got = found(lambda x: functional.all_reduce(x, name, "tp"), rows)
      np.testing.assert_allclose(got, for_all(law(rows)), rtol=1e-6)

    def scatters(name=name, rows=rows, law=law):
      rows = np.concatenate([rows] * 4, axis=1)
      got = found(lambda x: ops.reduce_scatter_tensor(x, name, 4, "tp"), rows)
      parts = np.split(law(rows), MEMBERS)
      np.testing.assert_allclose(got, np.stack(parts), rtol=1e-6)

    CASES[f"all_reduce_{name}"] = reduces
    CASES[f"reduce_scatter_{name}"] = scatters


_enter_reductions()


@case
def reductions_of_bools_add_by_or_and_compare_as_numbers():
  rows = INTEGERS % 2 == 0
  for name, law in (("sum", rows.any(0)), ("max", rows.any(0)), ("min", rows.all(0))):
    got = found(lambda x, name=name: functional.all_reduce(x, name, "tp"), rows)
    np.testing.assert_array_equal(got, for_all(law))


@case
def factories_like_a_shard_give_valid_loop_carries():
  makers = {
    0: (torch.zeros_like, torch.empty_like, lambda x: x.new_zeros(x.shape)),
    1: (torch.ones_like, lambda x: x.new_ones(x.shape)),
    2: (
      lambda x: torch.full_like(x, 2.0),
      lambda x: x.new_full(x.shape, 2.0),
      lambda x: torch.full_like(x, 2.0, dtype=torch.bfloat16).to(x.dtype),
    ),
  }
  for number, functions in makers.items():
    for make in functions:
      got = found(lambda x, make=make: fori_loop(0, 3, lambda _, t: t + x, make(x)))
      np.testing.assert_allclose(got, number + 3 * ROWS, rtol=1e-6)


@case
def blockwise_attention_in_shard_map_equals_the_plain_form():
  """Compare with the plain form for each way to shard query, key and value."""
  tensors = [torch.randn(2, 4, 8, 8, device="cpu").to("jax") for _ in range(3)]
  config, whole = torchax.default_env().config, PartitionSpec()
  of_heads, of_rows = PartitionSpec(None, "tp"), PartitionSpec(None, None, "tp")
  of_features = PartitionSpec(None, None, None, "tp")

  def outcome(word, specs, out):
    config.attention = word
    torch.manual_seed(0)
    attend = jax_shard_map(
      lambda *t: torch.nn.functional.scaled_dot_product_attention(*t, dropout_p=0.3),
      mesh=mesh(),
      in_specs=specs,
      out_specs=out,
      randomness={"dp": "same"},
    )

    def run(*tensors):
      leaves = [t.detach().requires_grad_() for t in tensors]
      output = attend(*leaves)
      return [output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)]

    with torchax.default_env():
      return jax_jit(run)(*tensors)

  try:
    for specs, out in (
      ((of_heads,) * 3, of_heads),
      ((of_rows, whole, whole), of_rows),
      ((whole, whole, of_features), of_features),
      ((whole,) * 3, of_heads),  # dropout masks differ between shards
    ):
      found, expected = (outcome(w, specs, out) for w in ("blockwise", "plain"))
      for have, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(have.cpu(), want.cpu(), atol=1e-5, rtol=1e-5)
  finally:
    config.attention = "auto"


@case
def all_gather_concatenates_the_members():
  for name in ("_c10d_functional", "_c10d_functional_autograd"):
    gather = getattr(torch.ops, name).all_gather_into_tensor
    got = found(lambda x, gather=gather: gather(x, 4, "tp"))
    np.testing.assert_array_equal(got, for_all(ROWS.reshape(-1, 3)))


@case
def all_to_all_transposes_members_and_chunks():
  expected = np.stack(
    [
      np.concatenate([row.reshape(4, 2, 3)[member] for row in ROWS])
      for member in range(MEMBERS)
    ]
  )
  for name in ("_c10d_functional", "_c10d_functional_autograd"):
    exchange = getattr(torch.ops, name).all_to_all_single
    got = found(lambda x, f=exchange: f(x, [2] * 4, [2] * 4, "tp"))
    np.testing.assert_array_equal(got, expected)


@case
def broadcast_sends_the_source_to_all_members():
  for source in range(MEMBERS):
    got = found(lambda x, source=source: functional.broadcast(x, source, "tp"))
    np.testing.assert_array_equal(got, for_all(ROWS[source]))


@case
def coalesced_collectives_equal_single_ones():
  got = found(lambda x: functional.all_reduce_coalesced([x, x * 2], "sum", "tp")[1])
  np.testing.assert_allclose(got, for_all(ROWS.sum(0) * 2), rtol=1e-6)
  got = found(lambda x: ops.all_gather_into_tensor_coalesced([x * 2, x], 4, "tp")[1])
  np.testing.assert_array_equal(got, for_all(ROWS.reshape(-1, 3)))
  got = found(
    lambda x: ops.reduce_scatter_tensor_coalesced([x, x + 1], "sum", 4, "tp")[0]
  )
  np.testing.assert_allclose(got, ROWS.sum(0).reshape(4, 2, 3), rtol=1e-6)


@case
def in_place_collectives_write_to_their_input():
  def in_place(x):
    target = x * 1
    result = ops.all_reduce_(target, "sum", "tp")
    assert result is target
    return target

  np.testing.assert_allclose(found(in_place), for_all(ROWS.sum(0)), rtol=1e-6)

  def several(x):
    targets = [x * 1, x * 2]
    ops.all_reduce_coalesced_(targets, "max", "tp")
    return targets[1]

  np.testing.assert_array_equal(found(several), for_all(ROWS.max(0) * 2))

  def source(x):
    target = x * 1
    ops.broadcast_(target, 1, "tp")
    return target

  np.testing.assert_array_equal(found(source), for_all(ROWS[1]))

  def out(x):
    target = torch.zeros(32, 3, device=x.device)
    ops.all_gather_into_tensor_out(x, 4, "tp", out=target)
    return target

  np.testing.assert_array_equal(found(out), for_all(ROWS.reshape(-1, 3)))


@case
def eager_results_equal_compiled_ones():
  def step(x):
    return functional.all_reduce(functional.broadcast(x, 1, "tp"), "avg", "tp")

  eager = on_members(step)(torch.tensor(ROWS).to("jax")).cpu().numpy()
  np.testing.assert_allclose(eager, for_all(ROWS[1]), rtol=1e-6)
  np.testing.assert_array_equal(eager, found(step))


@case
def wait_tensor_returns_the_tensor():
  got = found(lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", "tp")))
  np.testing.assert_allclose(got, for_all(ROWS.sum(0)), rtol=1e-6)


@case
def reduced_results_may_have_unsharded_out_specs():
  for name, (rows, law) in REDUCTIONS.items():
    reduce = jax_jit(
      jax_shard_map(
        lambda x, name=name: functional.all_reduce(x[0], name, "tp"),
        mesh=mesh(),
        in_specs=PartitionSpec("tp"),
        out_specs=PartitionSpec(),
      )
    )
    got = reduce(torch.tensor(rows).to("jax")).cpu().numpy()
    np.testing.assert_allclose(got, law(rows), rtol=1e-6)


@case
def world_group_is_all_mapped_axes():
  def of_one(x):
    return functional.all_reduce(x[0], "sum", "")

  both = jax_shard_map(
    of_one, mesh=mesh(), in_specs=PartitionSpec("tp"), out_specs=PartitionSpec()
  )
  got = jax_jit(both)(torch.tensor(ROWS).to("jax")).cpu().numpy()
  np.testing.assert_allclose(got, 2 * ROWS.sum(0), rtol=1e-6)


@case
def vmap_axis_is_a_group():
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    rows = jax_vmap(lambda x: functional.all_reduce(x, "max", "rows"), axis_name="rows")
    got = rows(torch.tensor(ROWS).to("jax")).cpu().numpy()
  np.testing.assert_array_equal(got, for_all(ROWS.max(0)))


# Collective -> (function, rows of its result, gradient), where the gradient of the
# results is `WEIGHTS`. The gradient of a linear map is its transpose; the gradient of
# an extremum goes to the members that have it.
def _weights(size: int) -> np.ndarray:
  return WEIGHTS[:, :size]


def _winners(rows, law):
  return (rows == law(rows)) * _weights(8).sum(0)


GRADIENTS = {
  "sum": (
    lambda x: functional.all_reduce(x, "sum", "tp"),
    8,
    lambda: for_all(_weights(8).sum(0)),
  ),
  "avg": (
    lambda x: functional.all_reduce(x, "avg", "tp"),
    8,
    lambda: for_all(_weights(8).mean(0)),
  ),
  "max": (
    lambda x: functional.all_reduce(x, "max", "tp"),
    8,
    lambda: _winners(ROWS, lambda rows: rows.max(0)),
  ),
  "min": (
    lambda x: functional.all_reduce(x, "min", "tp"),
    8,
    lambda: _winners(ROWS, lambda rows: rows.min(0)),
  ),
  "product": (
    lambda x: functional.all_reduce(x, "product", "tp"),
    8,
    lambda: _weights(8).sum(0) * ROWS.prod(0) / ROWS,
  ),
  "broadcast": (
    lambda x: functional.broadcast(x, 2, "tp"),
    8,
    lambda: (np.arange(MEMBERS) == 2)[:, None, None] * _weights(8).sum(0),
  ),
  "all_gather": (
    lambda x: ops.all_gather_into_tensor(x, 4, "tp"),
    32,
    lambda: WEIGHTS.sum(0).reshape(4, 8, 3),
  ),
  "reduce_scatter": (
    lambda x: ops.reduce_scatter_tensor(x, "sum", 4, "tp"),
    2,
    lambda: for_all(_weights(2).reshape(8, 3)),
  ),
  "all_to_all": (
    lambda x: ops.all_to_all_single(x, [2] * 4, [2] * 4, "tp"),
    8,
    lambda: np.swapaxes(_weights(8).reshape(4, 4, 2, 3), 0, 1).reshape(4, 8, 3),
  ),
}


def _enter_gradients() -> None:
  for name, (collective, size, law) in GRADIENTS.items():

    def differentiates(collective=collective, size=size, law=law):
      weights = torch.tensor(_weights(size)).to("jax")
      x = torch.tensor(ROWS).to("jax").requires_grad_()
      (jax_jit(on_members(collective))(x) * weights).sum().backward()
      np.testing.assert_allclose(x.grad.cpu().numpy(), law(), rtol=1e-5, atol=1e-6)

      def loss(array):
        tensor = torchax.interop.torch_view(array)
        return torchax.interop.jax_view(
          (on_members(collective)(tensor) * weights).sum()
        )

      by_jax = np.asarray(jax.jit(jax.grad(loss))(ROWS))
      np.testing.assert_allclose(by_jax, law(), rtol=1e-5, atol=1e-6)

    CASES[f"gradient_of_{name}"] = differentiates


_enter_gradients()


@case
def autograd_works_inside_of_shard_map():
  def gradient(x):
    x = x.detach().requires_grad_()
    total = functional.all_reduce(x * x, "sum", "tp")
    (found,) = torch.autograd.grad((total * total).sum(), x)
    return found

  # In torch, the gradient of all_reduce is an all_reduce of the gradients.
  total = (ROWS**2).sum(0)
  expected = 2 * total * MEMBERS * 2 * ROWS
  np.testing.assert_allclose(found(gradient), expected, rtol=1e-5)


@case
def upstreams_names_are_functions_of_arrays():
  spec = PartitionSpec("torch_dist")
  devices = Mesh(np.array(jax.devices()), ("torch_dist",))

  def run(function):
    mapped = jax.shard_map(
      function, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False
    )
    return np.asarray(jax.jit(mapped)(np.arange(8, dtype=np.float32)))

  numbers = np.arange(8, dtype=np.float32)
  every = lambda value: np.full(8, value, np.float32)  # noqa: E731
  np.testing.assert_array_equal(
    run(lambda x: jc10d._c10d_all_reduce(x, "sum", "a")), every(28)
  )
  np.testing.assert_array_equal(
    run(lambda x: jc10d._c10d_broadcast(x, 3, "a")), every(3)
  )
  np.testing.assert_array_equal(
    run(lambda x: jc10d._c10d_all_gather(x, 8, "a")), np.tile(numbers, 8)
  )
  np.testing.assert_array_equal(run(jc10d._c10d_wait_tensor), numbers)


REFUSALS = {
  "an axis that is not mapped": (
    lambda x: functional.all_reduce(x, "sum", "pp"),
    'mesh axis "pp", but the mapped axes are dp, tp',
  ),
  "another reduction": (
    lambda x: functional.all_reduce(x, "median", "tp"),
    "reduction of sum, avg, .* but got 'median'",
  ),
  "bits of floats": (
    lambda x: functional.all_reduce(x, "bor", "tp"),
    "expects integers or bools, but got float32",
  ),
  "a mean of integers": (
    lambda x: functional.all_reduce(x.int(), "avg", "tp"),
    "expects floats, but got int32",
  ),
  "a source that is no member": (
    lambda x: functional.broadcast(x, 4, "tp"),
    "from 0 to 3, but got 4",
  ),
  "a group of another size": (
    lambda x: ops.all_gather_into_tensor(x, 8, "tp"),
    r"expects group_size=4, the size of the axes \(tp\), but got 8",
  ),
  "what does not divide": (
    lambda x: ops.reduce_scatter_tensor(x[:6], "sum", 4, "tp"),
    r"4 equal parts, but got the shape \(6, 3\)",
  ),
  "parts of several sizes": (
    lambda x: ops.all_to_all_single(x, [1, 3, 2, 2], [1, 3, 2, 2], "tp"),
    "Pad the parts to the largest",
  ),
  "send and receive": (
    lambda x: ops.isend(x, 1, 0, "tp"),
    "permute_tensor",
  ),
}


def _enter_refusals() -> None:
  for name, (function, message) in REFUSALS.items():

    def refuses(function=function, message=message):
      with pytest.raises(CollectiveError, match=message):
        on_members(function)(torch.tensor(ROWS).to("jax"))

    CASES[f"refused: {name}"] = refuses


_enter_refusals()


@case
def error_outside_of_mapped_axes_names_the_remedy():
  x = torch.tensor(ROWS).to("jax")
  with pytest.raises(CollectiveError, match=r"no axis is mapped(.|\n)*jax_shard_map"):
    functional.all_reduce(x, "sum", "tp")
  same = functional.all_reduce(x, "sum", "")  # world of one process
  np.testing.assert_array_equal(same.cpu().numpy(), ROWS)


if __name__ == "__main__":
  many_devices.main(CASES, KINDS)
