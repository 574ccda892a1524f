"""Type aliases for values of torch code and of JAX code."""

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

Device: TypeAlias = int | str | torch.device | None
