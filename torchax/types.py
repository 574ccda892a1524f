"""Names for the two worlds: what torch code holds and what JAX code holds."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar, Union

import jax
import jax.numpy as jnp
import torch

P = ParamSpec("P")
R = TypeVar("R")

TorchValue: TypeAlias = Union[torch.Tensor, torch.dtype, "TorchCallable", Any]
TorchCallable: TypeAlias = Callable[P, TorchValue]
JaxValue: TypeAlias = Union[jax.Array, jnp.dtype, "JaxCallable", Any]
JaxCallable: TypeAlias = Callable[P, JaxValue]
