"""The only package that touches private API of torch; `test_torch_compat.py` guards it.

A file a theme. Each private name is looked up by `private.find`, which says what it is
for and what happens on a version of torch that has moved it. This file has the public
names of all themes.
"""

from torchax.compat.torch_compat.accelerator import *
from torchax.compat.torch_compat.backend import *
from torchax.compat.torch_compat.distributed import *
from torchax.compat.torch_compat.files import *
from torchax.compat.torch_compat.functions import *
from torchax.compat.torch_compat.graphs import *
from torchax.compat.torch_compat.lazy_modules import *
from torchax.compat.torch_compat.modes import *
from torchax.compat.torch_compat.operators import *
from torchax.compat.torch_compat.optimizers import *
from torchax.compat.torch_compat.swaps import *
from torchax.compat.torch_compat.wrappers import *
