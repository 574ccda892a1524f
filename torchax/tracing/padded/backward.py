"""Backward passes of functions with buckets, for torch's autograd.

The forward program returns its residuals padded, and one backward program serves all
sizes of a bucket, too. Cotangents are padded and gradients are cropped.
"""

from collections.abc import Sequence

import jax

from torchax.core.program_limit import Counted
from torchax.tracing.autograd_bridge import Tape
from torchax.tracing.padded import arrays
from torchax.tracing.padded.programs import Programs


class PaddedBackward:
  """Backward program of one bucket.

  Args:
    tape: record of the padded trace; its residuals are shapes.
  """

  def __init__(self, tape: Tape):
    self._tape = tape
    self._programs: Programs | None = None
    self._counted = Counted("backward", is_of_user=True)
    self._counted.of(self)

  def attach(self, tape: Tape) -> None:
    """Let the backward pass of a trace at true sizes run the padded program."""
    tape.program.run_by(_AtSizes(self, tape))

  def clear_cache(self) -> None:
    """Drop the programs."""
    self._programs = None

  def programs(self) -> Programs:
    """Return the programs, after the trace at the padded sizes."""
    if self._programs is None:
      jaxpr = self._tape.program.jaxpr(self._tape.residuals)
      self._programs = Programs(jaxpr, "backward", self._counted)
    return self._programs

  def shapes(self) -> list[jax.ShapeDtypeStruct]:
    """Return the padded residuals and cotangents."""
    return [*map(_shape_of, self._tape.residuals), *self._tape.program.avals]


class _AtSizes:
  """Backward pass at one combination of sizes."""

  def __init__(self, padded: PaddedBackward, tape: Tape):
    self._padded, self._tape = padded, tape
    self._found: tuple | None = None

  def __call__(self, residuals: Sequence, cotangents: Sequence) -> list:
    if self._found is None:
      jaxpr = self._tape.program.jaxpr(self._tape.residuals)
      shapes = self._padded.shapes()
      found = self._padded.programs().find(jaxpr, shapes)
      self._found = *found, shapes[len(residuals) :], jaxpr.out_avals
    program, operands, avals, results = self._found
    padded = [arrays.pad(c, aval.shape) for c, aval in zip(cotangents, avals)]
    found = program.jitted(operands, *residuals, *padded)
    return [
      gradient if gradient.shape == aval.shape else arrays.crop(gradient, aval.shape)
      for gradient, aval in zip(found, results)
    ]


def _shape_of(info) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(info.shape, info.dtype)
