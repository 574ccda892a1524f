"""Products of groups against CPU torch: values, dtypes, gradients, refusals."""

import re

import pytest
import torch
from ops.harness import Case, check, floats

import torchax

grouped_mm = torch.ops.aten._grouped_mm
bf16 = torch.bfloat16
ROWS = floats(8, 16)
EXPERTS = floats(4, 16, 32, seed=1)
COLUMNS = floats(16, 8, seed=2)
# The second group is empty.
ENDS = torch.tensor([3, 3, 6, 8], dtype=torch.int32)

CASES = (
  Case(grouped_mm, ROWS, EXPERTS, ENDS, grad=True, name="rows"),
  Case(grouped_mm, ROWS.to(bf16), EXPERTS.to(bf16), ENDS, name="rows in bfloat16"),
  Case(grouped_mm, EXPERTS.mT, COLUMNS, ENDS, grad=True, name="columns"),
  Case(grouped_mm, ROWS.T, floats(8, 32, seed=3), ENDS, grad=True, name="inner"),
  Case(grouped_mm, EXPERTS, EXPERTS.mT, grad=True, name="batches"),
  Case(torch.nn.functional.grouped_mm, ROWS, EXPERTS, offs=ENDS, name="public name"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_gives_what_cpu_torch_gives(case):
  check(case)


REFUSED = {
  "no offsets": (ROWS, EXPERTS),
  "offsets of batches": (EXPERTS, EXPERTS.mT, ENDS),
  "inner size": (ROWS, EXPERTS.mT, ENDS),
  "number of groups": (ROWS, EXPERTS[:3], ENDS),
  "dtypes": (ROWS, EXPERTS.to(bf16), ENDS),
  "integers": (ROWS.int(), EXPERTS.int(), ENDS),
  "offsets in another dtype": (ROWS, EXPERTS, ENDS.to(torch.int16)),
  "one dimension": (ROWS[0], EXPERTS, ENDS),
  "bias": (ROWS, EXPERTS, ENDS, floats(4, 32)),
  "wider result": (ROWS.to(bf16), EXPERTS.to(bf16), ENDS, None, torch.float32),
}


@pytest.mark.parametrize("args", REFUSED.values(), ids=REFUSED)
def test_it_raises_where_torch_raises(args):
  with pytest.raises(RuntimeError) as of_torch:
    grouped_mm(*args)
  moved = [arg.to("jax") if isinstance(arg, torch.Tensor) else arg for arg in args]
  expected = f"_grouped_mm|{re.escape(str(of_torch.value).splitlines()[0])}"
  with torchax.default_env(), pytest.raises(RuntimeError, match=expected):
    grouped_mm(*moved)
