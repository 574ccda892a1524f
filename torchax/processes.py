"""Public name of `distributed/processes`: one program in several processes."""

from torchax.distributed.processes import *  # noqa: F403
