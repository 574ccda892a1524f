"""Bessel functions of order 0 and 1, of all kinds, and the Airy function Ai.

Below a bound, J, K and the regular part of Y are Chebyshev series in x². Above it, the
amplitudes of the asymptotic forms are series in 1/x (Abramowitz & Stegun, 9.1, 9.2,
9.6, 9.7). The series have float64 accuracy; float32 sums more terms than it needs,
which costs little next to sine and cosine. Half precision is computed in float32.

Around 0 the Airy function is a Chebyshev series in x. Beyond, the amplitudes of the
asymptotic forms are series (DLMF, 9.7.5 and 9.7.9).
"""

import math

import jax.numpy as jnp
from jax import lax

from torchax.ops.builtin import op
from torchax.ops.jaten.special import chebyshev, in_floats
from torchax.registry.names import aten

# Chebyshev coefficients c₀ … cₙ of Σ cₖ Tₖ(t), fitted with mpmath at 40 digits.
# On 0 ≤ x ≤ 8, t = x²/32 - 1: J0(x), J1(x)/x, and the rest of Y0(x) and Y1(x)/x
# without their logarithm and pole. On x ≥ 8, t = 2 (8/x)² - 1: the amplitudes Pₙ(x)
# and x Qₙ(x) of cosine and sine. On 0 < x ≤ 2, t = x²/2 - 1: K0(x) + ln(x/2) I0(x) and
# x (K1(x) - ln(x/2) I1(x)). On x ≥ 2, t = 4/x - 1: √x eˣ Kₙ(x).
# fmt: off
_J0_SMALL = (
  0.15772797147489012, -0.008723442352852221, 0.2651786132033368, -0.37009499387264977,
  0.15806710233209725, -0.034893769411408884, 0.004819180069467605,
  -0.00046062616620627504, 3.246032882100508e-05, -1.7619469077621507e-06,
  7.608163592418782e-08, -2.679253530557673e-09, 7.848696314479465e-11,
  -1.9438346867370164e-12, 4.125320595634374e-14, -7.588508125447546e-16,
  1.2218515873961411e-17,
)
_Y0_SMALL = (
  0.03645469809116044, -0.2783237094075825, 0.2960499990207148, 0.09825508408187864,
  -0.10755155280627783, 0.031799074084414514, -0.005161397105810715,
  0.0005498525320039012, -4.1996983149420134e-05, 2.4290361107923793e-06,
  -1.1049969793472957e-07, 4.06651736597911e-09, -1.2374148898289854e-10,
  3.1685725528945945e-12, -6.926956032431002e-14, 1.3086308625876684e-15,
  -2.1586201986914482e-17,
)
_P0 = (
  0.9994603493475187, -0.0005365220468132117, 3.0751847875194745e-06,
  -5.1705945376060975e-08, 1.6306464635151382e-09, -7.86409137723707e-11,
  5.168262387349193e-12, -4.3045788699253914e-13, 4.3265957431549404e-14,
  -5.069034095935236e-15, 6.748072215733873e-16, -1.0011513723467786e-16,
  1.6305919233744186e-17,
)
_Q0 = (
  -0.12444683684269607, 0.0005470815954089319, -5.9315987288485175e-06,
  1.4377965798375193e-07, -5.817532749493056e-09, 3.376097523734991e-10,
  -2.565397936797308e-11, 2.404916100281365e-12, -2.6690625482579414e-13,
  3.4041800321963686e-14, -4.87994410531204e-15, 7.729703176242605e-16,
  -1.3348852171502517e-16, 2.4865952389390515e-17, -4.952892629886516e-18,
)
_J1_SMALL = (
  0.08104484632565812, -0.1489751450676521, 0.1609992623572097, -0.08268049176681791,
  0.022213639654966037, -0.003646940600769276, 0.0004050337728354822,
  -3.255554866857259e-05, 1.9858774049915165e-06, -9.521984756750436e-08,
  3.687133759097148e-09, -1.178026622695885e-10, 3.160154580348003e-12,
  -7.221755239651773e-14, 1.4232144003513942e-15, -2.4441972916190464e-17,
)
_Y1_SMALL = (
  0.038300769852423776, -0.08182561412732826, -0.0248677076121964,
  0.047967452752746984, -0.01852588451089802, 0.003680607687823511,
  -0.0004627254060293369, 4.06940026958087e-05, -2.6617695125295625e-06,
  1.350602691325434e-07, -5.483524110336276e-09, 1.8245086841229007e-10,
  -5.070666636591129e-12, 1.1956162517587948e-13, -2.423162442712473e-15,
  4.268126513072962e-17,
)
_P1 = (
  1.0009030408600137, 0.0008989898330859408, -3.987284300488908e-06,
  6.177633960644299e-08, -1.8718907491063067e-09, 8.816898659582339e-11,
  -5.704863640395645e-12, 4.699195515230542e-13, -4.6842237839904895e-14,
  5.452674896044717e-15, -7.221180842274018e-16, 1.0667689114335412e-16,
  -1.7312313216116335e-17,
)
_Q1 = (
  0.3742222965562826, -0.0007702178839325664, 7.3108922063643636e-06,
  -1.676782510726674e-07, 6.583354662120443e-09, -3.749090950541556e-10,
  2.8121750359748866e-11, -2.61145253946232e-12, 2.8774212663332235e-13,
  -3.649001916061838e-14, 5.206626366226707e-15, -8.215318025458595e-16,
  1.4141084390211833e-16, -2.626761589838529e-17, 5.2192649196714085e-18,
)
_K0_SMALL = (
  -0.2676636966169514, 0.3442898999246285, 0.0359799365153615, 0.001264615411446926,
  2.286212103119452e-05, 2.5347910790261494e-07, 1.904516377220209e-09,
  1.0349695257633625e-11, 4.2598161427910826e-14, 1.3744654358807508e-16,
)
_K0_LARGE = (
  1.2201515410329777, -0.0314481013119645, 0.0015698838857300533,
  -0.00012849549581627802, 1.39498137188765e-05, -1.8317555227191195e-06,
  2.766813639445015e-07, -4.660489897687948e-08, 8.574034017414225e-09,
  -1.6975345093890614e-09, 3.5773972814003283e-10, -7.957489244477396e-11,
  1.8559491149549264e-11, -4.514597883374519e-12, 1.1403405882073441e-12,
  -2.9800969231481784e-13, 8.032890775068375e-14, -2.2275133267462965e-14,
  6.340076476276646e-15, -1.848593377920907e-15, 5.5120559994043335e-16,
  -1.6782311257549006e-16, 5.2103917776435543e-17, -1.6475805939842632e-17,
)
_K1_SMALL = (
  0.7626501136694739, -0.3531559607765449, -0.12261118082265715, -0.006975723859639864,
  -0.0001730288957513052, -2.4334061415659684e-06, -2.213387630734726e-08,
  -1.4114883926335278e-10, -6.666901694199329e-13, -2.427449850519366e-15,
)
_K1_LARGE = (
  1.3603130952422213, 0.10392373657681724, -0.002857816859622779,
  0.00019521551847135162, -1.936197974166083e-05, 2.406484947837217e-06,
  -3.5019606030878126e-07, 5.7410841254500495e-08, -1.0345762465678097e-08,
  2.0150497551970347e-09, -4.1903547593419254e-10, 9.218315187605315e-11,
  -2.129967838427791e-11, 5.139639673482343e-12, -1.2891739609498229e-12,
  3.348419666052243e-13, -8.976705182010146e-14, 2.4771544242195988e-14,
  -7.0198370892147685e-15, 2.038703166239861e-15, -6.057047270643018e-16,
  1.8380935752430455e-16, -5.689462849193648e-17, 1.7940510478863572e-17,
)
# fmt: on

OSCILLATORY_BOUND = 8.0
DECAYING_BOUND = 2.0


def _small(x, bound):
  """Return the variable t of a series in x² on [0, bound]; finite for larger x."""
  return 2 * jnp.square(jnp.minimum(x, bound) / bound) - 1


# --- Oscillating: J and Y -----------------------------------------------------------


def _amplitudes(order, x):
  """Return √(2/πx) (P, Q), and cosine and sine of x - (2 order + 1) π/4, for x ≥ 8."""
  x = jnp.maximum(x, OSCILLATORY_BOUND)
  t = 2 * jnp.square(OSCILLATORY_BOUND / x) - 1
  p, q = ((_P0, _Q0), (_P1, _Q1))[order]
  scale = jnp.sqrt(2 / (math.pi * x))
  cosine, sine = jnp.cos(x), jnp.sin(x)
  # Computing the shift by quarter turns as sums keeps the accuracy of cos(x).
  same, opposite = (cosine + sine) * math.sqrt(0.5), (sine - cosine) * math.sqrt(0.5)
  phase = (same, opposite) if order == 0 else (opposite, -same)
  return scale * chebyshev(p, t), scale * chebyshev(q, t) / x, *phase


def _bessel_j(order, x):
  """Compute Jₙ of x ≥ 0; NaN at infinity, as in torch."""
  t = _small(x, OSCILLATORY_BOUND)
  small = chebyshev(_J0_SMALL, t) if order == 0 else x * chebyshev(_J1_SMALL, t)
  p, q, cosine, sine = _amplitudes(order, x)
  return jnp.where(x <= OSCILLATORY_BOUND, small, p * cosine - q * sine)


def _bessel_y(order, x):
  """Compute Yₙ; -inf at 0, NaN below and at infinity."""
  t = _small(x, OSCILLATORY_BOUND)
  logarithm = (2 / math.pi) * jnp.log(x / 2) * _bessel_j(order, x)
  if order == 0:
    small = logarithm + chebyshev(_Y0_SMALL, t)
  else:
    small = logarithm - (2 / math.pi) / x + x * chebyshev(_Y1_SMALL, t)
  p, q, cosine, sine = _amplitudes(order, x)
  result = jnp.where(x <= OSCILLATORY_BOUND, small, p * sine + q * cosine)
  result = jnp.where(x == 0, -math.inf, result)
  return jnp.where(x < 0, math.nan, result).astype(x.dtype)


@op(aten.special_bessel_j0)
@in_floats
def _aten_special_bessel_j0(self):
  return _bessel_j(0, jnp.abs(self))


@op(aten.special_bessel_j1)
@in_floats
def _aten_special_bessel_j1(self):
  return jnp.sign(self) * _bessel_j(1, jnp.abs(self))


@op(aten.special_bessel_y0)
@in_floats
def _aten_special_bessel_y0(self):
  return _bessel_y(0, self)


@op(aten.special_bessel_y1)
@in_floats
def _aten_special_bessel_y1(self):
  return _bessel_y(1, self)


@op(aten.special_spherical_bessel_j0)
@in_floats
def _aten_special_spherical_bessel_j0(x):
  """Compute sin(x) / x; 1 at 0 and 0 at infinity."""
  return jnp.where(jnp.isinf(x), 0, jnp.sinc(x / math.pi))


# --- Modified: I and K --------------------------------------------------------------


@op(aten.i0, aten.special_i0, aten.special_modified_bessel_i0)
@in_floats
def _aten_i0(self):
  return lax.bessel_i0e(self) * jnp.exp(jnp.abs(self))


@op(aten.special_i0e)
@in_floats
def _aten_i0e(self):
  return lax.bessel_i0e(self)


@op(aten.special_i1, aten.special_modified_bessel_i1)
@in_floats
def _aten_special_i1(self):
  return lax.bessel_i1e(self) * jnp.exp(jnp.abs(self))


@op(aten.special_i1e)
@in_floats
def _aten_special_i1e(self):
  return lax.bessel_i1e(self)


def _scaled_bessel_k(order, x):
  """Compute eˣ Kₙ(x); inf at 0, NaN below."""
  near = jnp.clip(x, 0, DECAYING_BOUND)
  t = _small(near, DECAYING_BOUND)
  if order == 0:
    growing = lax.bessel_i0e(near) * jnp.exp(near)
    small = chebyshev(_K0_SMALL, t) - jnp.log(near / 2) * growing
  else:
    growing = lax.bessel_i1e(near) * jnp.exp(near)
    small = chebyshev(_K1_SMALL, t) / near + jnp.log(near / 2) * growing
  far = jnp.maximum(x, DECAYING_BOUND)
  series = _K0_LARGE if order == 0 else _K1_LARGE
  large = chebyshev(series, 4 / far - 1) / jnp.sqrt(far)
  result = jnp.where(x <= DECAYING_BOUND, small * jnp.exp(near), large)
  result = jnp.where(x == 0, math.inf, jnp.where(x < 0, math.nan, result))
  return jnp.where(jnp.isnan(x), x, result).astype(x.dtype)


@op(aten.special_scaled_modified_bessel_k0)
@in_floats
def _aten_special_scaled_modified_bessel_k0(x):
  return _scaled_bessel_k(0, x)


@op(aten.special_scaled_modified_bessel_k1)
@in_floats
def _aten_special_scaled_modified_bessel_k1(x):
  return _scaled_bessel_k(1, x)


@op(aten.special_modified_bessel_k0)
@in_floats
def _aten_special_modified_bessel_k0(self):
  return _scaled_bessel_k(0, self) * jnp.exp(-self)


@op(aten.special_modified_bessel_k1)
@in_floats
def _aten_special_modified_bessel_k1(self):
  return _scaled_bessel_k(1, self) * jnp.exp(-self)


# --- The Airy function --------------------------------------------------------------

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
  # Computing cos(ζ - π/4) and sin(ζ - π/4) as sums keeps the accuracy of cos ζ.
  turned = p * (cosine + sine) + q * (sine - cosine)
  return turned * math.sqrt(0.5 / math.pi) / jnp.sqrt(jnp.sqrt(distance))


@op(aten.special_airy_ai)
@in_floats
def _aten_special_airy_ai(x):
  """Compute Ai(x); NaN at both infinities, as in torch."""
  value = jnp.where(x < LEFT_BOUND, _oscillating(x), _near(x))
  value = jnp.where(x > RIGHT_BOUND, _decaying(x), value)
  return jnp.where(jnp.isfinite(x), value, math.nan)
