"""Program: inputs, statements as text and results. It can be printed as a script."""

import dataclasses
import re

# Suffixes of an input on its device.
NO_GRAD, LEAF, RESULT = "", ".requires_grad_()", ".requires_grad_() * 1"
# Name -> (CPU tensor, one of the suffixes above). Multiples of a sixteenth keep results
# exact, and a small number of shapes lets programs share compiled operations.
INPUTS = {
  "x": ("(torch.arange(12.0).reshape(4, 3) * 5 % 12 - 5) / 4", LEAF),
  "y": ("(torch.arange(16.0).reshape(4, 4) * 7 % 16 - 8) / 8", RESULT),
  "z": ("(torch.arange(3.0) - 1) / 2", LEAF),
  "p": ("(torch.arange(12.0).reshape(4, 3) * 7 % 12 - 6) / 4", NO_GRAD),
  "q": ("(torch.arange(24.0).reshape(2, 3, 4) * 7 % 24 - 12) / 8", NO_GRAD),
  "s": ("(torch.arange(16.0).reshape(4, 4) * 5 % 16 - 8) / 4", NO_GRAD),
  "k": ("torch.arange(12).reshape(4, 3) * 5 % 7 - 3", NO_GRAD),
  "i": ("torch.tensor([2, 0, 1, 2])", NO_GRAD),
  "m": ("torch.arange(12).reshape(4, 3) % 3 == 0", NO_GRAD),
  "c": ("torch.complex(torch.arange(6.0) / 4, 1 - torch.arange(6.0) / 2)", NO_GRAD),
}

HEADER = """\
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import torchax
from torchax import interop
from torchax.interop import jax_jit as jit
from torchax.interop import scan

torchax.enable_globally()
"""

_DRAWS = re.compile(
  r"rand|dropout|bernoulli|uniform_|normal|exponential_|multinomial|rrelu"
)
_NAMES = re.compile(r"(?<![\w.])[a-z]\w*")


@dataclasses.dataclass(frozen=True)
class Program:
  """Torch program on named inputs.

  Attributes:
    statements: sources of one or more lines each.
    results: names of the variables that it returns.
  """

  statements: tuple[str, ...]
  results: tuple[str, ...]

  @property
  def inputs(self) -> tuple[str, ...]:
    """Names of the inputs that are used, in the order of `INPUTS`."""
    used = set(_NAMES.findall("\n".join((*self.statements, *self.results))))
    return tuple(name for name in INPUTS if name in used)

  @property
  def draws(self) -> bool:
    """True if it draws random numbers."""
    return any(map(_DRAWS.search, self.statements))

  @property
  def lines(self) -> int:
    """Number of lines of its statements."""
    return sum(statement.count("\n") + 1 for statement in self.statements)

  @property
  def source(self) -> str:
    """Source of the function `program`."""
    body = "\n".join(self.statements).replace("\n", "\n  ")
    head = f"def program({', '.join(self.inputs)}):\n"
    return f"{head}  {body}\n  return {', '.join(self.results)},\n"

  def script(self, run: str, device: str) -> str:
    """Return a script that runs the program.

    Args:
      run: source of the function to call, in terms of `program`.
      device: device of the inputs.
    """
    inputs = [
      f'  ({INPUTS[name][0]}).to("{device}"){INPUTS[name][1]},\n'
      for name in self.inputs
    ]
    return (
      f"{HEADER}\n{self.source}\ntorch.manual_seed(1)\n"
      f"inputs = [\n{''.join(inputs)}]\nprint(({run})(*inputs), *inputs)\n"
    )
