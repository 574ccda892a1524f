"""Models that are compared, with the inputs of each: one row a model."""

import dataclasses
import functools
from collections.abc import Callable

import torch
from models import huggingface, networks


@dataclasses.dataclass(frozen=True)
class Row:
  """Model with its inputs.

  Attributes:
    make: probability of dropout -> module whose results have a "loss".
    inputs: keyword arguments, as CPU tensors.
    drawn: names of inputs that the model draws if they are missing.
  """

  make: Callable[[float], torch.nn.Module]
  inputs: Callable[[], dict[str, torch.Tensor]]
  drawn: tuple[str, ...] = ()

  def model(self, dropout: float) -> torch.nn.Module:
    """Return the model on the CPU, always with the same weights."""
    torch.manual_seed(0)
    model = self.make(dropout)
    # In new models biases are zero and transformers almost linear, which hides faults.
    with torch.no_grad():
      for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    return model

  def undrawn_inputs(self) -> dict[str, torch.Tensor]:
    """Return the inputs without those that the model can draw."""
    return {name: x for name, x in self.inputs().items() if name not in self.drawn}


def _families(attention: str) -> dict[str, Row]:
  return {
    name: Row(functools.partial(make, attention), inputs)
    for name, (make, inputs) in huggingface.FAMILIES.items()
  }


def _mixtral(experts: str) -> Row:
  make = functools.partial(huggingface.mixtral, "sdpa", experts=experts)
  return Row(make, huggingface.text)


MODELS = _families("sdpa") | {
  "ResNet": Row(networks.ResNet, networks.labelled_images),
  "U-Net": Row(networks.Segmentation, networks.labelled_pixels),
  "LSTM language model": Row(networks.LanguageModel, networks.sentences),
  "Diffusion step": Row(
    networks.Diffusion, networks.noisy_images, drawn=("noise", "times")
  ),
}
# Other implementations of the same models.
VARIANTS = {
  f"{name}, attention written out": row for name, row in _families("eager").items()
} | {"Mixtral, a matrix for each word": _mixtral("batched_mm")}
# Implementation that looks up the words of each expert by their numbers.
LOOP_OVER_EXPERTS = _mixtral("eager")
