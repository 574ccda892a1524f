"""Backward passes of functions with buckets, for torch's autograd.

The forward program returns its residuals padded, and one backward program serves all
sizes of a bucket, too. Cotangents are padded and gradients are cropped.
"""

import functools
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
    find = functools.cache(lambda: self._find(tape))

    def run(residuals: Sequence, cotangents: Sequence) -> list:
      program, operands, avals, results = find()
      padded = [arrays.pad(c, aval.shape) for c, aval in zip(cotangents, avals)]
      found = program.jitted(operands, *residuals, *padded)
      return [
        gradient if gradient.shape == aval.shape else arrays.crop(gradient, aval.shape)
        for gradient, aval in zip(found, results)
      ]

    tape.program.run_by(run)

  def clear_cache(self) -> None:
    """Drop the programs."""
    self._programs = None

  def _find(self, tape: Tape) -> tuple:
    """Return a program, its operands, padded cotangents and true gradients."""
    padded = self._tape
    if self._programs is None:
      jaxpr = padded.program.jaxpr(padded.residuals)
      self._programs = Programs(jaxpr, "backward", self._counted)
    jaxpr = tape.program.jaxpr(tape.residuals)
    cotangents = padded.program.avals
    shapes = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in padded.residuals]
    found = self._programs.find(jaxpr, [*shapes, *cotangents])
    return *found, cotangents, jaxpr.out_avals
