"""The Airy function Ai.

Around 0 it is a Chebyshev series in x; beyond, series of the amplitudes of the
asymptotic forms (DLMF, 9.7.5 and 9.7.9), as the Bessel functions of `bessel.py` are.
"""

import math

import jax.numpy as jnp

from torchax.ops.builtin import op
from torchax.ops.jaten._chebyshev import chebyshev
from torchax.ops.promotion import to_float
from torchax.registry.names import aten

# Chebyshev coefficients, fitted with mpmath at 40 digits; ζ = 2/3 |x|^(3/2).
# On -6 ≤ x ≤ 2, t = (x + 2)/4: Ai(x). On x ≥ 2, t = 2 (2/x)^(3/2) - 1:
# 2 √π x^(1/4) exp(ζ) Ai(x). On x ≤ -6, t = 2 (6/|x|)³ - 1: P and ζ Q of
# √π |x|^(1/4) Ai(x) = P cos(ζ - π/4) + Q sin(ζ - π/4).
# fmt: off
_AI_NEAR = (
  0.07981034257083895, 0.13358598577835648, -0.12888154225314424,
  -0.08776265494035469, -0.11786513948317262, 0.2494019918868029,
  -0.035635245648797415, -0.12552960424978643, 0.07658320862153278,
  0.006539826099616935, -0.023099786059506074, 0.0075040528747347115,
  0.0017030155672010565, -0.001847967273977794, 0.0003517624295647609,
  0.00013635466079863891, -8.308790360342944e-05, 8.894157813861605e-06,
  5.884144160957906e-06, -2.388680332415851e-06, 1.1078940909561706e-07,
  1.625312951027347e-07, -4.7480935940319924e-08, -1.754949228512617e-10,
  3.144514394466578e-09, -6.872528750687637e-10, -3.432139716305899e-11,
  4.5120269871187276e-11, -7.505023274955363e-12, -7.320391388335262e-13,
  4.998060740578426e-13, -6.330395765884145e-14, -9.638462850616974e-15,
  4.403519218800548e-15, -4.1759243545597107e-16, -9.31695346064716e-17,
  3.1579001128543586e-17,
)
_AI_RIGHT = (
  0.9844053049171552, -0.014792784850104199, 0.0007327177465426715,
  -6.12595423417825e-05, 6.83476697557269e-06, -9.237229735403982e-07,
  1.436225340438052e-07, -2.489319422322096e-08, 4.709793440054328e-09,
  -9.583863708112733e-10, 2.0745855483677591e-10, -4.737267332192277e-11,
  1.1336099808224236e-11, -2.827706782319351e-12, 7.320712095125598e-13,
  -1.9599793911089723e-13, 5.4101162570683925e-14, -1.5356466802223836e-14,
  4.472340393300025e-15, -1.3338094674756683e-15, 4.066582046456231e-16,
  -1.265583225645289e-16, 4.015126334015871e-17, -1.2969972135960937e-17,
)
_AI_P = (
  0.9998088477395531, -0.00019041677962134863, 7.267968168417445e-07,
  -8.485426967529796e-09, 1.9144545982950886e-10, -6.778493941405162e-12,
  3.345666079656652e-13, -2.1345137724465704e-14, 1.6718079441151791e-15,
  -1.5491724858625586e-16, 1.6524273492513008e-17,
)
_AI_Q = (
  0.06925101122700861, -0.00019199395713168297, 1.4144485007348916e-06,
  -2.4076418454371364e-08, 7.033135474188027e-10, -3.0199171290130837e-11,
  1.73483636560491e-12, -1.2527799137757002e-13, 1.0886384509119664e-14,
  -1.1026771285105438e-15, 1.2709996936013433e-16, -1.6365087007659018e-17,
  2.3195560389025733e-18,
)
# fmt: on

LEFT_BOUND, RIGHT_BOUND = -6.0, 2.0


def _phase(distance):
  return 2 / 3 * distance * jnp.sqrt(distance)


def _near(x):
  half = (RIGHT_BOUND - LEFT_BOUND) / 2
  middle = (RIGHT_BOUND + LEFT_BOUND) / 2
  return chebyshev(_AI_NEAR, (jnp.clip(x, LEFT_BOUND, RIGHT_BOUND) - middle) / half)


def _decaying(x):
  x = jnp.maximum(x, RIGHT_BOUND)
  ratio = RIGHT_BOUND / x
  amplitude = chebyshev(_AI_RIGHT, 2 * ratio * jnp.sqrt(ratio) - 1)
  scale = 2 * math.sqrt(math.pi) * jnp.sqrt(jnp.sqrt(x))
  return amplitude * jnp.exp(-_phase(x)) / scale


def _oscillating(x):
  distance = jnp.maximum(-x, -LEFT_BOUND)
  phase = _phase(distance)
  t = 2 * (-LEFT_BOUND / distance) ** 3 - 1
  p, q = chebyshev(_AI_P, t), chebyshev(_AI_Q, t) / phase
  cosine, sine = jnp.cos(phase), jnp.sin(phase)
  # cos(ζ - π/4) and sin(ζ - π/4): as sums they keep the accuracy of cos ζ for large ζ.
  turned = p * (cosine + sine) + q * (sine - cosine)
  return turned * math.sqrt(0.5 / math.pi) / jnp.sqrt(jnp.sqrt(distance))


@op(aten.special_airy_ai)
def _aten_special_airy_ai(x):
  """NaN at both infinities, as in torch."""
  x = to_float(x)
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  value = jnp.where(wide < LEFT_BOUND, _oscillating(wide), _near(wide))
  value = jnp.where(wide > RIGHT_BOUND, _decaying(wide), value)
  return jnp.where(jnp.isfinite(wide), value, math.nan).astype(x.dtype)
