"""`torch.optim` inside compiled functions: what would go wrong silently is refused.

An optimizer that counts its steps on the host would count while it is traced and never
again; one that makes its state on the first step would make it out of traced values.
"""

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchax.core.storage import active
from torchax.errors import TracedStateError
from torchax.tensor import Tensor


def _check_traced_step(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
  """Raises where a step inside a compiled function would not be what it seems."""
  if active.boundary is None:
    return
  name = type(optimizer).__name__
  for group in optimizer.param_groups:
    if group.get("capturable") is False and not group.get("fused"):
      raise TracedStateError(
        f"{name} counts its steps on the host, which a compiled function does only "
        f"while it is traced. Make it with `{name}(…, capturable=True)`."
      )
    is_stateful = "capturable" in group or bool(group.get("momentum"))
    if is_stateful and not optimizer.state:
      raise TracedStateError(
        f"{name} would make its state while a function is compiled. Run one step "
        "eagerly before the compiled ones, so that the state exists."
      )
  if any(_counts_on_host(state) for state in optimizer.state.values()):
    raise TracedStateError(
      f"{name} counts its steps on the host, which a compiled function does only while "
      f"it is traced. Use `{name}(…, fused=True)` where torch has it, or run its steps "
      "eagerly."
    )


def _counts_on_host(state: dict) -> bool:
  return "step" in state and not isinstance(state["step"], Tensor)


register_optimizer_step_pre_hook(_check_traced_step)
