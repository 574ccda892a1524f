"""Table in Markdown of measurements on the default device of JAX.

usage: python -m benchmarks.accelerator [--out=output/accelerator.md] [--only=attention]

The baselines are plain JAX and, if torch has CUDA, torch's eager mode and Inductor on
that device. The dtype of attention is bfloat16 on an accelerator.
"""

import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from absl import app, flags

import torchax
from benchmarks import compiled, eager, lengths, train_step
from benchmarks.tables import table
from benchmarks.timing import Row, compare, measure

_OUT = flags.DEFINE_string("out", "output/accelerator.md", "Path of the table.")
_GROUPS = ("eager", "train_step", "attention", "compiled", "lengths", "memory")
_ONLY = flags.DEFINE_list("only", list(_GROUPS), f"Groups to run: {_GROUPS}.")

ROUNDS, CALLS = 9, 20


def _is_accelerator() -> bool:
  return jax.default_backend() != "cpu"


# torch on CUDA ------------------------------------------------------------------------


def _on_cuda(function: Callable) -> float:
  """Return the median time of a call in microseconds, with torch on a CUDA device."""
  for _ in range(3):
    function()
  torch.cuda.synchronize()
  times = []
  for _ in range(ROUNDS):
    start = time.perf_counter()
    for _ in range(CALLS):
      function()
    torch.cuda.synchronize()
    times.append((time.perf_counter() - start) / CALLS * 1e6)
  return statistics.median(times)


def _beside_cuda(name: str, make: Callable, compiles: bool = False) -> list[Row]:
  """Measure a function on jax against the same function of torch on CUDA.

  Args:
    name: name of the row.
    make: device -> function without arguments.
    compiles: add a row with `torch.compile` of the function as the baseline.
  """
  if not torch.cuda.is_available():
    return []
  ours = measure(make("jax"))
  with torchax.disable_temporarily():
    theirs = make("cuda")
    rows = [Row(name, "torch eager", ours, _on_cuda(theirs), None)]
    if compiles:
      rows.append(Row(name, "inductor", ours, _on_cuda(torch.compile(theirs)), None))
  return rows


def _eager_on_cuda() -> list[Row]:
  def unary(function):
    def make(device):
      x = torch.ones(1024, 1024, device=device)
      return lambda: function(x)

    return make

  functions = {
    "eager x + x, 1024×1024": lambda x: x + x,
    "eager x @ x": lambda x: x @ x,
    "eager softmax": lambda x: torch.softmax(x, -1),
    "eager layer_norm": lambda x: F.layer_norm(x, (1024,)),
    "eager dropout": lambda x: F.dropout(x, 0.1),
  }
  return [row for name, f in functions.items() for row in _beside_cuda(name, unary(f))]


# Attention ----------------------------------------------------------------------------


def _attention_shape() -> tuple[int, ...]:
  return (8, 16, 2048, 64) if _is_accelerator() else (1, 4, 128, 32)


def _attention(device: str, backward: bool, dropout: float) -> Callable:
  dtype = torch.bfloat16 if _is_accelerator() else torch.float32
  parts = [torch.randn(_attention_shape(), device=device, dtype=dtype) for _ in "qkv"]
  query, key, value = (part.requires_grad_(backward) for part in parts)

  def run():
    mixed = F.scaled_dot_product_attention(
      query, key, value, is_causal=True, dropout_p=dropout
    )
    if not backward:
      return mixed
    query.grad = key.grad = value.grad = None
    mixed.sum().backward()
    return query.grad

  return run


def _plain_attention(backward: bool) -> Callable:
  """Return JAX's attention, in the implementation that it chooses for the device."""
  batch, heads, length, width = _attention_shape()
  dtype = jnp.bfloat16 if _is_accelerator() else jnp.float32
  keys = jax.random.split(jax.random.key(0), 3)
  parts = [jax.random.normal(k, (batch, length, heads, width), dtype) for k in keys]

  def forward(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)

  def loss(*given):
    return forward(*given).astype(jnp.float32).sum()

  run = jax.jit(jax.grad(loss, (0, 1, 2)) if backward else forward)
  return lambda: run(*parts)


def _attention_rows() -> list[Row]:
  rows = []
  for backward in (False, True):
    name = "attention, causal" + (", forward and backward" if backward else "")
    ours = _attention("jax", backward, 0.0)
    rows.append(compare(name, ours, _plain_attention(backward), None))
    for dropout in (0.0, 0.1):
      full = f"{name}, dropout {dropout}" if dropout else name
      rows += _beside_cuda(full, lambda d, p=dropout, b=backward: _attention(d, b, p))
  return rows


def _in_form(word: str, function: Callable) -> Callable:
  """Return the function, run with this word for `Configuration.attention`."""
  config = torchax.default_env().config

  def run():
    config.attention = word
    try:
      return function()
    finally:
      config.attention = "auto"

  return run


def _form_rows() -> list[Row]:
  """Measure attention in its automatic and blockwise forms against the plain form."""
  rows = []
  for backward in (False, True):
    for dropout in (0.0, 0.1):
      function = _attention("jax", backward, dropout)
      name = "forward and backward" if backward else "forward"
      for word in ("auto", "blockwise"):
        full = f"attention, {word}, {name}, dropout {dropout}"
        forms = _in_form(word, function), _in_form("plain", function)
        rows.append(compare(full, *forms, None, "plain form"))
  return rows


# Memory -------------------------------------------------------------------------------


def _memory_rows() -> list[Row]:
  """Return temporary bytes, in place of microseconds, of a training step's program."""
  ours, plain, _ = train_step._steps()
  return [train_step._memory(ours, plain)]


# The table ----------------------------------------------------------------------------


def _rows_of(group: str) -> list[Row]:
  if group == "eager":
    return [*eager.rows(), *_eager_on_cuda()]
  if group == "attention":
    return [*_attention_rows(), *_form_rows()]
  if group == "memory":
    return _memory_rows()
  modules = {"train_step": train_step, "compiled": compiled, "lengths": lengths}
  return modules[group].rows()


def main(_) -> None:
  """Entry point of `absl.app.run`."""
  unknown = set(_ONLY.value) - set(_GROUPS)
  if unknown:
    raise app.UsageError(f"no groups {sorted(unknown)}; there are {_GROUPS}")
  torchax.enable_globally()
  path = pathlib.Path(_OUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  rows: list[Row] = []
  for group in _ONLY.value:
    rows += _rows_of(group)
    path.write_text(table(rows))  # an interrupted run leaves the rows measured so far
  print(path.read_text())


if __name__ == "__main__":
  app.run(main)
