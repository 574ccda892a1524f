"""Random programs of views and writes agree with CPU torch, eager and compiled.

A program is a list of steps (name, index of a tensor, two numbers). A step makes a view
of a tensor that is alive, or changes it. A step that raises must raise on both sides.

Results that torch leaves undefined are left out: writes to elements that share memory
and that torch does not refuse (assignment by index only warns), and sources that
overlap their target. So is memory that grows, because its new elements are undefined.
"""

import torch
from compare import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from torchax.interop import jax_jit
from torchax.tensor import Tensor


def _flat_stride(t, k):
  """Return a strided view of the storage, from the offset of the tensor."""
  return t.as_strided((2, 2), (2, 1), t.storage_offset() + k)


# Name -> function of a tensor and two small numbers that returns a view.
VIEWS = {
  "index": lambda t, k, j: t[k % t.shape[0]],
  "index_last": lambda t, k, j: t[..., -1 - k],
  "slice": lambda t, k, j: t[k % 2 :],
  "step": lambda t, k, j: t[..., j % 2 :: 1 + k % 2],
  "none": lambda t, k, j: t[:, None],
  "transpose": lambda t, k, j: t.transpose(0, -1),
  "permute": lambda t, k, j: t.permute(*range(1, t.dim()), 0),
  "flatten": lambda t, k, j: t.view(-1),
  "fold": lambda t, k, j: t.view(t.numel() // 2, 2),
  "reshape": lambda t, k, j: t.reshape(2, -1),
  "unsqueeze": lambda t, k, j: t.unsqueeze(k % (t.dim() + 1)),
  "squeeze": lambda t, k, j: t.squeeze(),
  "diagonal": lambda t, k, j: t.diagonal(k - 1, 0, 1),
  "chunk": lambda t, k, j: t.chunk(2, j % 2)[-1],
  "split": lambda t, k, j: t.split([1, t.shape[0] - 1])[k % 2],
  "unbind": lambda t, k, j: t.unbind(-1)[0],
  "narrow": lambda t, k, j: t.narrow(-1, j % 2, 1),
  "unfold": lambda t, k, j: t.unfold(-1, 1 + k % 2, 2),
  "expand": lambda t, k, j: t.expand(2, *t.shape),
  "strided": lambda t, k, j: _flat_stride(t, k),
  "detach": lambda t, k, j: t.detach(),
  "data": lambda t, k, j: t.data,
  "bytes": lambda t, k, j: t.view(torch.int16),
  "from_bytes": lambda t, k, j: t.view(torch.int32),
  "copy": lambda t, k, j: t.clone(memory_format=torch.contiguous_format),
}
# Name -> function of two tensors and two numbers that changes the first tensor.
WRITES = {
  "mul": lambda t, o, k, j: t.mul_(2 + k),
  "add": lambda t, o, k, j: t.add_(o.clone()),
  "sub_own": lambda t, o, k, j: t.sub_(t[:1].clone()),
  "fill": lambda t, o, k, j: t.fill_(k),
  "zero": lambda t, o, k, j: t.zero_(),
  "copy_": lambda t, o, k, j: t.copy_(o.clone()),
  "assign": lambda t, o, k, j: t.__setitem__(0, k),
  "assign_slice": lambda t, o, k, j: t.__setitem__((..., slice(j % 2, None, 2)), 7 + k),
  "assign_tensor": lambda t, o, k, j: t.__setitem__(slice(1, None), o[:1].clone()),
  "assign_list": lambda t, o, k, j: 0 in t.stride() or t.__setitem__([0, -1], 5 + k),
  "assign_mask": lambda t, o, k, j: 0 in t.stride() or t.__setitem__(t > 4, k),
  "masked_fill": lambda t, o, k, j: 0 in t.stride() or t.masked_fill_(t < 3, 9),
  "index_put": lambda t, o, k, j: (
    0 in t.stride()
    or t.index_put_(
      (torch.tensor([0, 0]).to(t.device),), t[:1].clone(), accumulate=True
    )
  ),
  "cumulate": lambda t, o, k, j: t.copy_(t.flip(0)),
  "transpose_": lambda t, o, k, j: t.transpose_(0, -1),
  "unsqueeze_": lambda t, o, k, j: t.unsqueeze_(k % (t.dim() + 1)),
  "squeeze_": lambda t, o, k, j: t.squeeze_(),
  "shrink": lambda t, o, k, j: 0 in t.stride() or t.resize_(t.numel() // 2),
  "resize": lambda t, o, k, j: 0 in t.stride() or t.resize_(t.numel() // 2, 2),
  "become": lambda t, o, k, j: t.set_(o),
  "become_data": lambda t, o, k, j: setattr(t, "data", o),
}
STEPS = sorted({**VIEWS, **WRITES})
# A compiled program copies the memory of an argument: only its elements change.
COMPILED_STEPS = [name for name in STEPS if not name.startswith("become")]
ERRORS = (RuntimeError, IndexError, ZeroDivisionError, ValueError)


def _programs(names):
  numbers = st.integers(0, 2)
  step = st.tuples(st.sampled_from(names), st.integers(0, 6), numbers, numbers)
  return st.lists(step, min_size=2, max_size=8)


def _starts() -> list[torch.Tensor]:
  numbers = torch.arange(8, dtype=torch.int32)
  return [numbers.reshape(2, 4).clone(), numbers.reshape(2, 2, 2).clone()]


def _run(program, starts, after_step=lambda step, tensors: None):
  """Run a program; return all tensors it made, and the steps that raised."""
  tensors, errors = list(starts), []
  for step, (name, which, k, j) in enumerate(program):
    tensor = tensors[which % len(tensors)]
    other = tensors[(which + k) % len(tensors)]
    try:
      if name in VIEWS:
        tensors.append(VIEWS[name](tensor, k, j))
      else:
        WRITES[name](tensor, other, k, j)
    except ERRORS as error:
      errors.append((step, type(error)))
    after_step(step, tensors)
  return tensors, errors


def _memory(tensor):
  """Return the whole storage of a tensor, in its original dtype."""
  if isinstance(tensor, Tensor):
    return tensor._storage.read().tobytes()
  return bytes(tensor.untyped_storage())


@settings(max_examples=40)
@given(program=_programs(STEPS))
def test_view_programs_match_torch(program):
  memories = []
  note = lambda step, tensors: memories.append([_memory(t) for t in tensors])  # noqa: E731
  expected, expected_errors = _run(program, _starts(), note)

  def compare(step, tensors):
    assert [_memory(t) for t in tensors] == memories[step], program[: step + 1]

  actual, actual_errors = _run(program, [t.to("jax") for t in _starts()], compare)
  assert actual_errors == expected_errors
  assert [t.stride() for t in actual] == [t.stride() for t in expected]
  offsets = [t.storage_offset() for t in expected]
  assert [t.storage_offset() for t in actual] == offsets
  assert [t._is_view() for t in actual] == [t._is_view() for t in expected]
  assert_same(actual, expected)


@settings(max_examples=15)
@given(program=_programs(COMPILED_STEPS))
def test_compiled_view_programs_match_torch(program):
  expected_starts, starts = _starts(), [t.to("jax") for t in _starts()]
  actual_errors = []

  def run(*tensors):
    results, errors = _run(program, tensors)
    actual_errors[:] = errors
    return [result.clone() for result in results]

  expected, expected_errors = _run(program, expected_starts)
  actual = jax_jit(run)(*starts)
  assert actual_errors == expected_errors
  assert_same(actual, expected)
  assert_same(starts, expected_starts, "the arguments")
  assert [t.stride() for t in starts] == [t.stride() for t in expected_starts]
