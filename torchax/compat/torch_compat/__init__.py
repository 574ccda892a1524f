"""Private API of torch, used in this folder only; `test_layers.py` checks that.

Each file has one theme; this file collects their public names. Every private name is
looked up by `private.find`, which states its feature and the replacement for versions
of torch that lack it.
"""

from torchax.compat.torch_compat.accelerator import *
from torchax.compat.torch_compat.device_backend import *
from torchax.compat.torch_compat.distributed import *
from torchax.compat.torch_compat.encoders import *
from torchax.compat.torch_compat.files import *
from torchax.compat.torch_compat.functions import *
from torchax.compat.torch_compat.graphs import *
from torchax.compat.torch_compat.jagged import *
from torchax.compat.torch_compat.mode_state import *
from torchax.compat.torch_compat.modules import *
from torchax.compat.torch_compat.operators import *
from torchax.compat.torch_compat.profiler import *
from torchax.compat.torch_compat.subclasses import *
from torchax.compat.torch_compat.swaps import *
from torchax.compat.torch_compat.torchscript import *
from torchax.compat.torch_compat.traced_modules import *
from torchax.compat.torch_compat.wrappers import *
