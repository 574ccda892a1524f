"""Generator of random programs, one statement after the other.

CPU torch runs each new statement at once, so shapes are known and statements that torch
refuses are left out. The templates are in `templates.py`.
"""

import random
import re
import warnings

import torch

from tools.fuzz import templates
from tools.fuzz.program import INPUTS, Program
from tools.fuzz.ways import SEED, inputs_of, namespace

LENGTH = 12
MOST_ELEMENTS = 64
MOST_DIMS = 4
LARGEST = 1e3


def generate(seed: int, draws: bool | None = None) -> Program:
  """Return the program of a seed.

  Args:
    seed: seed of the choices.
    draws: True for random operators; by default in one program of eight.
  """
  rng = random.Random(seed)
  draws = rng.random() < 1 / 8 if draws is None else draws
  names = rng.sample(sorted(INPUTS), rng.choice((1, 2, 2, 3)))
  if not set(names) & {"x", "y", "p", "s", "q"}:
    names.append(rng.choice(("x", "p")))
  maker = _Maker(rng, names, draws)
  for _ in range(rng.randint(3, LENGTH)):
    maker.add_statement()
  return maker.program()


class _Maker:
  """Builder of a program, with the program's variables on CPU torch."""

  def __init__(self, rng: random.Random, names: list[str], draws: bool):
    self.rng, self.names, self.draws = rng, names, draws
    self.statements: list[str] = []
    self.variables = self._rerun()
    self.next = 0

  def add_statement(self, tries: int = 30) -> None:
    """Add a statement that CPU torch runs."""
    for _ in range(tries):
      statement = self._statement()
      if statement is None:
        continue
      if self._runs(statement):
        self.statements.append(statement)
        return
      self.variables = self._rerun()

  def program(self) -> Program:
    """Return the program, with some of the variables as its results."""
    tensors = [n for n in self._tensors() if n not in self.names]
    tensors = tensors[-5:] or self.names
    results = self.rng.sample(tensors, min(len(tensors), self.rng.randint(1, 3)))
    return Program(tuple(self.statements), tuple(results))

  def _statement(self) -> str | None:
    tensors = self._tensors()
    # Newer variables are used more often: programs become chains.
    names = list(tensors)
    name = self.rng.choice(names[-4:] if self.rng.random() < 0.6 else names)
    other = self.rng.choice(names)
    maker = templates.choose(self.rng, self.draws)
    context = templates.Context(self.rng, tensors, name, other, f"v{self.next}")
    statement = maker(context)
    if statement is None or _depends_on_layout(statement, tensors):
      return None
    if re.search(rf"\bv{self.next}\b", statement):
      self.next += 1
    return statement

  def _tensors(self) -> dict[str, torch.Tensor]:
    return {n: v for n, v in self.variables.items() if type(v) is torch.Tensor}

  def _rerun(self) -> dict:
    torch.manual_seed(SEED)
    variables = namespace("cpu")
    variables.update(zip(self.names, inputs_of(self.names, "cpu")))
    for statement in self.statements:
      exec(statement, variables)
    return variables

  def _runs(self, statement: str) -> bool:
    is_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else a statement that warns passes the second time
    try:
      with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(statement, self.variables)
    except SyntaxError:
      raise
    except Exception:  # torch refuses it
      return False
    finally:
      torch.set_warn_always(is_always)
    return all(map(_is_moderate, self._tensors().values()))


_OF_LAYOUT = re.compile(r"(\w+)\.(?:as_strided|contiguous|flatten|ravel|reshape)\(")


def _depends_on_layout(statement: str, tensors: dict[str, torch.Tensor]) -> bool:
  """Return True if strides of a result matter: on jax results are contiguous."""
  used = [tensors[name] for name in _OF_LAYOUT.findall(statement) if name in tensors]
  bases = [tensor if tensor._base is None else tensor._base for tensor in used]
  return not all(base.is_contiguous() for base in bases)


def _is_moderate(tensor: torch.Tensor) -> bool:
  """Return True if a tensor can be compared: its size and its numbers are small."""
  if tensor.numel() > MOST_ELEMENTS or tensor.dim() > MOST_DIMS:
    return False
  if tensor.requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
    return False  # torch's fill_ of integers makes one, and its backward pass fails
  tensor = tensor.detach()
  if not tensor.numel() or tensor.dtype is torch.bool:
    return True
  return bool(tensor.abs().max() < LARGEST)
