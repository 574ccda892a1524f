"""Rules for operations that call other graphs: nested functions, loops and branches."""

import jax.numpy as jnp
from jax import lax

from torchax.compat import jax_compat
from torchax.tracing.padded.graphs import PARTS
from torchax.tracing.padded.program import Operation, Size, rule, true

_LOOPS = ("scan", "while", "cond")


@rule(*[name for name in PARTS if name not in _LOOPS])
def _call(operation: Operation, *operands) -> list:
  (part,) = operation.equation.parts
  params = operation.equation.jax.params
  if params.get("differentiated") and params.get("prevent_cse"):
    # The barrier keeps XLA from merging a recomputed part with the forward pass.
    operands = lax.optimization_barrier(operands)
  return operation.program.evaluate(part, operands)


@rule("cond")
def _cond(operation: Operation, index, *operands) -> list:
  run = operation.program.evaluate
  branches = [lambda *args, part=p: run(part, args) for p in operation.equation.parts]
  return list(lax.switch(index, branches, *operands))


@rule("while")
def _while(operation: Operation, *operands) -> list:
  params, run = operation.params, operation.program.evaluate
  of_condition = params["cond_nconsts"]
  of_body = of_condition + params["body_nconsts"]
  first, second = operands[:of_condition], operands[of_condition:of_body]
  condition, body = operation.equation.parts
  return list(
    lax.while_loop(
      lambda carry: run(condition, [*first, *carry])[0],
      lambda carry: run(body, [*second, *carry]),
      list(operands[of_body:]),
    )
  )


@rule("scan", sized=("length",))
def _scan(operation: Operation, *operands) -> list:
  """Run a scan; beyond the true number of steps the carry keeps its values."""
  params, run = operation.equation.jax.params, operation.program.evaluate
  (part,) = operation.equation.parts
  constants = jax_compat.constants_of_scan(params)
  carried = constants + jax_compat.carry_of_scan(params)
  length = operation.params["length"]

  def body(carry, step):
    number, *elements = step
    results = run(part, [*operands[:constants], *carry, *elements])
    new = results[: len(carry)]
    if isinstance(length, Size):
      is_step = number < true(length)
      new = [jnp.where(is_step, after, before) for after, before in zip(new, carry)]
    return new, results[len(carry) :]

  steps = jnp.arange(int(length))
  carry, results = lax.scan(
    body,
    list(operands[constants:carried]),
    [steps, *operands[carried:]],
    length=int(length),
    reverse=params["reverse"],
    unroll=params["unroll"],
  )
  return [*carry, *results]
