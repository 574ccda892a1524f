"""Table in Markdown of measurements on the default device of JAX.

usage: python -m benchmarks.accelerator [--out=output/accelerator.md] [--only=attention]

The baselines are plain JAX and, if torch has CUDA, torch's eager mode and Inductor on
that device. The dtype of attention is bfloat16 on an accelerator.
"""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import torch
from absl import app, flags

import torchax
from benchmarks import compiled, eager, lengths, programs, train_step
from benchmarks.tables import table
from benchmarks.timing import Row, compare, measure
from torchax.interop import jax_jit

_OUT = flags.DEFINE_string("out", "output/accelerator.md", "Path of the table.")
_ONLY = flags.DEFINE_list("only", None, "Groups to run; all of `_groups` if not given.")


# Program -> form ("eager", "Inductor", …) -> microseconds.
Times = dict[str, dict[str, float]]


def _is_accelerator() -> bool:
  return jax.default_backend() != "cpu"


# torch on CUDA ------------------------------------------------------------------------


def _cuda_times(beginning: str) -> Times:
  """Return the times of `programs.py` on CUDA; nothing if torch has no CUDA."""
  if not torch.cuda.is_available():
    return {}
  command = [sys.executable, "-m", "benchmarks.programs", beginning]
  output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
  return json.loads(output.splitlines()[-1])


def _program_rows(times: Times) -> list[Row]:
  """Measure `programs.py` eagerly on jax, beside CUDA or a program that adds 1."""
  array = jnp.ones(1 << 26 if _is_accelerator() else 1 << 18)
  write = jax.jit(lambda array: array + 1)
  rows = []
  for name, make in programs.programs(_is_accelerator()).items():
    if name.startswith("train step"):
      continue  # see _training_rows
    function = make("jax")
    ours = measure(function)
    of_cuda = times.get(name, {})
    rows += [
      Row(f"eager {name}", f"torch {word}", ours, of_cuda[word], None)
      for word in of_cuda
    ]
    if "numbers" in name:
      rows.append(
        compare(f"eager {name}", function, lambda: write(array), None, "JAX, x + 1")
      )
  return rows


# Training -----------------------------------------------------------------------------


def _model_size():
  return programs.LARGE if _is_accelerator() else train_step.SMALL


def _in_mode(mode: str, step: Callable) -> Callable:
  """Return a call of the step in an eager mode."""

  def call():
    with torchax.eager_mode(mode):
      return step()

  return call


def _functional_row() -> Row:
  """Measure a compiled functional step of a model that fills the device."""
  size = _model_size()
  ours, plain = train_step.steps(size)
  name = f"functional train step, width {size.width}"
  return compare(name, lambda: ours()[0], lambda: plain()[0], 1.0)


def _training_rows(times: Times) -> Iterator[Row]:
  """Measure steps as people write them, compiled and eager, beside those of CUDA."""
  for size in programs.training_sizes(_is_accelerator()):
    name = f"train step, width {size.width}"
    forms = {
      "jax_jit": jax_jit(programs.training_step(size, "jax")),
      "fused": _in_mode("fused", programs.training_step(size, "jax")),
      "eager": programs.training_step(size, "jax"),
    }
    for form, step in forms.items():
      took = measure(step)
      for word, theirs in (times.get(name) or {"(no CUDA)": took}).items():
        yield Row(f"{name}, {form}", f"torch {word}", took, theirs, None)


# Attention ----------------------------------------------------------------------------


def _attention(backward: bool, dropout: float) -> Callable:
  name = "attention, forward and backward" if backward else "attention"
  return programs.programs(_is_accelerator())[f"{name}, dropout {dropout}"]("jax")


def _plain_attention(backward: bool) -> Callable:
  """Return JAX's attention, with cuDNN on NVIDIA GPUs."""
  implementation = "cudnn" if jax.default_backend() == "gpu" else None
  batch, heads, length, width = programs.attention_shape(_is_accelerator())
  dtype = jnp.bfloat16 if _is_accelerator() else jnp.float32
  keys = jax.random.split(jax.random.key(0), 3)
  parts = [jax.random.normal(k, (batch, length, heads, width), dtype) for k in keys]

  def forward(query, key, value):
    return jax.nn.dot_product_attention(
      query, key, value, is_causal=True, implementation=implementation
    )

  def loss(*given):
    return forward(*given).astype(jnp.float32).sum()

  run = jax.jit(jax.grad(loss, (0, 1, 2)) if backward else forward)
  return lambda: run(*parts)


def _attention_rows() -> list[Row]:
  rows = []
  for backward in (False, True):
    name = "attention, causal" + (", forward and backward" if backward else "")
    function = _attention(backward, 0.0)
    rows.append(compare(name, function, _plain_attention(backward), None))
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
      function = _attention(backward, dropout)
      name = "forward and backward" if backward else "forward"
      for word in ("auto", "blockwise"):
        full = f"attention, {word}, {name}, dropout {dropout}"
        forms = _in_form(word, function), _in_form("plain", function)
        rows.append(compare(full, *forms, None, "plain form"))
  return rows


# The table ----------------------------------------------------------------------------


def _groups(
  times: Times,
) -> dict[str, Callable[[], Iterable[Row]]]:
  """Return the function that measures each group of rows, beside times on CUDA."""
  return {
    "eager": eager.rows,
    "programs": lambda: _program_rows(times),
    "training": lambda: _training_rows(times),
    "train_step": lambda: [*train_step.rows(), _functional_row()],
    "attention": lambda: [*_attention_rows(), *_form_rows()],
    "compiled": compiled.rows,
    "lengths": lengths.rows,
    "memory": lambda: [train_step.memory_row(*train_step.steps(_model_size()))],
  }


def main(_) -> None:
  """Entry point of `absl.app.run`."""
  times: Times = {}
  groups = _groups(times)
  only = _ONLY.value or list(groups)
  if unknown := sorted(set(only) - set(groups)):
    raise app.UsageError(f"expects groups of {list(groups)}, but got {unknown}")
  # Before JAX takes the device's memory.
  times |= _cuda_times("" if "programs" in only else "train step")
  torchax.enable_globally()
  path = pathlib.Path(_OUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  rows: list[Row] = []
  for group in only:
    for row in groups[group]():
      rows.append(row)
      path.write_text(table(rows))  # an interrupted run leaves the rows measured so far
  print(path.read_text())


if __name__ == "__main__":
  app.run(main)
