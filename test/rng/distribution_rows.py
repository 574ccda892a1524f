"""Rows for the classes of `torch.distributions`: parameters, mistakes, laws.

`test_distributions.py` asserts what must hold for each.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
import torch.distributions as D
from rng.goodness import Cdf
from scipy import stats

t = torch.tensor


@dataclasses.dataclass
class Row:
  """One distribution.

  Attributes:
    build: the class, or a function that builds a distribution from the parameters.
    parameters: name -> CPU tensor (other values are passed unchanged).
    bad: a parameter and a value that torch refuses.
    law: distribution of `view` of a sample; an array in it has an element per column.
    view: array of samples (N, …) -> numbers of shape (N,) or (N, columns).
    cls: the class, if `build` is a function.
    undrawable: reason why a compiled function cannot draw from it.
    unchecked: reason why a compiled function needs validate_args=False to build it.
    gradient_rtol: tolerance of a sample's gradient relative to its largest element;
      by default that of the dtype.
    no_gradient: reason why CPU torch has no gradient of a sample.
  """

  build: Callable
  parameters: dict
  bad: tuple
  law: object
  view: Callable = lambda drawn: drawn
  cls: type | None = None
  undrawable: str = ""
  unchecked: str = ""
  gradient_rtol: float | None = None
  no_gradient: str = ""

  @property
  def distribution(self) -> type:
    return self.cls or self.build


def _logit(p):
  return np.log(p) - np.log1p(-p)


LOC, SCALE = t([0.0, 1.0]), t([1.0, 2.0])
PROBS = t([0.2, 0.7])
WEIGHTS = t([0.2, 0.5, 0.3])
TRIL = t([[1.0, 0.0], [0.5, 0.8]])
COVARIANCE = TRIL @ TRIL.T

_loc, _scale, _probs = (value.double().numpy() for value in (LOC, SCALE, PROBS))
_weights = WEIGHTS.double().numpy()
_covariance = COVARIANCE.double().numpy()
_std = np.sqrt(np.diag(_covariance))
_normal = stats.norm(_loc, _scale)
# Views: the sum of the coordinates, which depends on their correlation, and each one.
_with_sum = lambda drawn: np.column_stack([drawn, drawn.sum(-1)])  # noqa: E731
_normal_with_sum = stats.norm([0, 1, 1], [*_std, np.sqrt(_covariance.sum())])

# Rates of decay that belong to continuous Bernoulli probabilities of 0.2 and 0.3.
_falls = -_logit(np.array([0.2, 0.3]))

_SQUARE_ROOT = "torch branches on whether the matrix is symmetric, which has no value"

# torch computes the derivative of a gamma or beta variable by its concentration with
# fits that are accurate to three digits: aten/src/ATen/native/Distributions.h.
FIT_RTOL = 5e-3

ROWS = {
  "Bernoulli": Row(
    D.Bernoulli, {"probs": PROBS}, ("probs", t([0.2, 1.5])), stats.bernoulli(_probs)
  ),
  "Bernoulli, logits": Row(
    D.Bernoulli,
    {"logits": t([-1.0, 2.0])},
    ("logits", t([0.0, float("nan")])),
    stats.bernoulli(1 / (1 + np.exp([1.0, -2.0]))),
  ),
  "Beta": Row(
    D.Beta,
    {"concentration1": t([2.0, 0.5]), "concentration0": t([1.0, 3.0])},
    ("concentration1", t([-1.0, 1.0])),
    stats.beta([2.0, 0.5], [1.0, 3.0]),
    gradient_rtol=FIT_RTOL,
  ),
  "Binomial": Row(
    D.Binomial,
    {"total_count": t([10.0, 40.0]), "probs": PROBS},
    ("total_count", t([-1.0, 2.0])),
    stats.binom([10, 40], _probs),
  ),
  "Categorical": Row(
    D.Categorical, {"probs": WEIGHTS}, ("probs", t([-0.2, 0.5, 0.7])), _weights
  ),
  "Categorical, logits": Row(
    D.Categorical,
    {"logits": t([0.0, 1.0, -1.0])},
    ("logits", t([0.0, float("nan"), 0.0])),
    np.exp([0.0, 1.0, -1.0]) / np.exp([0.0, 1.0, -1.0]).sum(),
  ),
  "Cauchy": Row(
    D.Cauchy,
    {"loc": LOC, "scale": SCALE},
    ("scale", t([0.0, 1.0])),
    stats.cauchy(_loc, _scale),
  ),
  "Chi2": Row(
    D.Chi2,
    {"df": t([1.0, 4.0])},
    ("df", t([-1.0, 1.0])),
    stats.chi2([1, 4]),
    gradient_rtol=FIT_RTOL,
  ),
  "ContinuousBernoulli": Row(
    D.ContinuousBernoulli,
    {"probs": PROBS},
    ("probs", t([0.2, 1.5])),
    # A truncated exponential; the law for 0.7 mirrors that for 0.3.
    stats.truncexpon(
      -_logit(np.array([0.2, 0.3])), 0, -1 / _logit(np.array([0.2, 0.3]))
    ),
    view=lambda drawn: np.where([False, True], 1 - drawn, drawn),
  ),
  "Dirichlet": Row(
    D.Dirichlet,
    {"concentration": t([0.5, 1.0, 3.0])},
    ("concentration", t([-1.0, 1.0, 3.0])),
    stats.beta([0.5, 1.0, 3.0], [4.0, 3.5, 1.5]),
    gradient_rtol=FIT_RTOL,
  ),
  "Exponential": Row(
    D.Exponential,
    {"rate": t([0.5, 2.0])},
    ("rate", t([0.0, 1.0])),
    stats.expon(scale=[2.0, 0.5]),
  ),
  "FisherSnedecor": Row(
    D.FisherSnedecor,
    {"df1": t([3.0, 8.0]), "df2": t([10.0, 12.0])},
    ("df1", t([0.0, 1.0])),
    stats.f([3, 8], [10, 12]),
    gradient_rtol=FIT_RTOL,
  ),
  "Gamma": Row(
    D.Gamma,
    {"concentration": t([0.5, 3.0]), "rate": t([1.0, 2.0])},
    ("rate", t([0.0, 1.0])),
    stats.gamma([0.5, 3.0], scale=[1.0, 0.5]),
    gradient_rtol=FIT_RTOL,
  ),
  "GeneralizedPareto": Row(
    D.GeneralizedPareto,
    {"loc": LOC, "scale": SCALE, "concentration": t([0.1, 0.2])},
    ("scale", t([-1.0, 1.0])),
    stats.genpareto([0.1, 0.2], _loc, _scale),
  ),
  "Geometric": Row(
    D.Geometric,
    {"probs": PROBS},
    ("probs", t([0.0, 0.5])),
    stats.geom(_probs, loc=-1),
    unchecked="torch asks for `(probs > 0).all()` beside its constraints",
  ),
  "Gumbel": Row(
    D.Gumbel,
    {"loc": LOC, "scale": SCALE},
    ("scale", t([0.0, 1.0])),
    stats.gumbel_r(_loc, _scale),
  ),
  "HalfCauchy": Row(
    D.HalfCauchy,
    {"scale": SCALE},
    ("scale", t([0.0, 1.0])),
    stats.halfcauchy(scale=_scale),
  ),
  "HalfNormal": Row(
    D.HalfNormal,
    {"scale": SCALE},
    ("scale", t([0.0, 1.0])),
    stats.halfnorm(scale=_scale),
  ),
  "Independent": Row(
    lambda loc, scale, **kwargs: D.Independent(
      D.Normal(loc, scale, **kwargs), 1, **kwargs
    ),
    {"loc": LOC, "scale": SCALE},
    ("scale", t([0.0, 1.0])),
    _normal,
    cls=D.Independent,
  ),
  "InverseGamma": Row(
    D.InverseGamma,
    {"concentration": t([3.0, 5.0]), "rate": t([1.0, 2.0])},
    ("rate", t([0.0, 1.0])),
    stats.invgamma([3, 5], scale=[1, 2]),
    gradient_rtol=FIT_RTOL,
  ),
  "Kumaraswamy": Row(
    D.Kumaraswamy,
    {"concentration1": t([1.0, 2.0]), "concentration0": t([1.5, 3.0])},
    ("concentration1", t([0.0, 1.0])),
    stats.beta(1.0, [1.5, 3.0]),
    view=lambda drawn: drawn ** np.array([1.0, 2.0]),
  ),
  "LKJCholesky": Row(
    D.LKJCholesky,
    {"dim": 3, "concentration": t(1.5)},
    ("concentration", t(-1.0)),
    # For an LKJ matrix of correlations r: (r + 1) / 2 is Beta with η - 1 + d/2 twice.
    # In torch's samples this holds only for the first correlation. From the third row
    # on, the squared radius is Beta(k - 1/2, …) in torch and Beta(k/2, …) in its source
    # (Lewandowski et al. 2009, https://doi.org/10.1016/j.jmva.2009.04.008, 3.2).
    stats.beta(2.0, 2.0),
    view=lambda drawn: (drawn[:, 1, 0] + 1) / 2,
  ),
  "Laplace": Row(
    D.Laplace,
    {"loc": LOC, "scale": SCALE},
    ("scale", t([0.0, 1.0])),
    stats.laplace(_loc, _scale),
  ),
  "LogNormal": Row(
    D.LogNormal,
    {"loc": LOC, "scale": SCALE},
    ("scale", t([0.0, 1.0])),
    stats.lognorm(_scale, scale=np.exp(_loc)),
  ),
  "LogisticNormal": Row(
    D.LogisticNormal,
    {"loc": LOC, "scale": SCALE},
    ("scale", t([0.0, 1.0])),
    # The first of three sticks is σ(y - log 2); the second breaks the rest.
    _normal,
    view=lambda drawn: np.stack(
      [
        _logit(drawn[:, 0]) + np.log(2),
        np.log(drawn[:, 1]) - np.log(drawn[:, 2]),
      ],
      axis=-1,
    ),
  ),
  "LowRankMultivariateNormal": Row(
    D.LowRankMultivariateNormal,
    {
      "loc": LOC,
      "cov_factor": t([[1.0], [0.5]]),
      "cov_diag": t([0.0625, 0.64]),
    },
    ("cov_diag", t([-1.0, 1.0])),
    stats.norm([0, 1, 1], np.sqrt([1.0625, 0.89, 1.0625 + 0.89 + 1.0])),
    view=_with_sum,
  ),
  "MixtureSameFamily": Row(
    lambda probs, loc, scale, **kwargs: D.MixtureSameFamily(
      D.Categorical(probs, **kwargs), D.Normal(loc, scale, **kwargs), **kwargs
    ),
    {"probs": t([0.3, 0.7]), "loc": LOC, "scale": SCALE},
    ("scale", t([0.0, 1.0])),
    Cdf(lambda x: _normal.cdf(x[..., None]) @ [0.3, 0.7]),
    cls=D.MixtureSameFamily,
  ),
  "Multinomial": Row(
    D.Multinomial,
    {"total_count": 10, "probs": WEIGHTS},
    ("probs", t([-0.2, 0.5, 0.7])),
    stats.binom(10, _weights),
  ),
  "MultivariateNormal": Row(
    D.MultivariateNormal,
    {"loc": LOC, "scale_tril": TRIL},
    ("scale_tril", t([[1.0, 0.0], [0.5, -0.8]])),
    _normal_with_sum,
    view=_with_sum,
  ),
  "MultivariateNormal, covariance": Row(
    D.MultivariateNormal,
    {"loc": LOC, "covariance_matrix": COVARIANCE},
    ("covariance_matrix", t([[1.0, 2.0], [2.0, 1.0]])),
    _normal_with_sum,
    view=_with_sum,
    unchecked=_SQUARE_ROOT,
  ),
  "MultivariateNormal, precision": Row(
    D.MultivariateNormal,
    {"loc": LOC, "precision_matrix": COVARIANCE.inverse()},
    ("precision_matrix", t([[1.0, 2.0], [2.0, 1.0]])),
    _normal_with_sum,
    view=_with_sum,
    unchecked=_SQUARE_ROOT,
  ),
  "NegativeBinomial": Row(
    D.NegativeBinomial,
    {"total_count": t([3.0, 5.0]), "probs": PROBS},
    ("probs", t([0.2, 1.5])),
    stats.nbinom([3, 5], 1 - _probs),
  ),
  "Normal": Row(
    D.Normal, {"loc": LOC, "scale": SCALE}, ("scale", t([-1.0, 1.0])), _normal
  ),
  "OneHotCategorical": Row(
    D.OneHotCategorical,
    {"probs": WEIGHTS},
    ("probs", t([-0.2, 0.5, 0.7])),
    _weights,
    view=lambda drawn: drawn.argmax(-1),
  ),
  "OneHotCategoricalStraightThrough": Row(
    D.OneHotCategoricalStraightThrough,
    {"probs": WEIGHTS},
    ("probs", t([-0.2, 0.5, 0.7])),
    _weights,
    view=lambda drawn: drawn.argmax(-1),
  ),
  "Pareto": Row(
    D.Pareto,
    {"scale": SCALE, "alpha": t([3.0, 4.0])},
    ("alpha", t([0.0, 1.0])),
    stats.pareto([3, 4], scale=_scale),
  ),
  "Poisson": Row(
    D.Poisson,
    {"rate": t([0.5, 30.0])},
    ("rate", t([-1.0, 1.0])),
    stats.poisson([0.5, 30.0]),
  ),
  "RelaxedBernoulli": Row(
    D.RelaxedBernoulli,
    {"temperature": t(0.5), "probs": PROBS},
    ("probs", t([0.2, 1.5])),
    stats.logistic(_logit(_probs)),
    view=lambda drawn: 0.5 * _logit(drawn),
  ),
  "RelaxedOneHotCategorical": Row(
    D.RelaxedOneHotCategorical,
    {"temperature": t(0.5), "probs": WEIGHTS},
    ("probs", t([-0.2, 0.5, 0.7])),
    # The difference of two Gumbel variables is logistic.
    stats.logistic(np.log(_weights[:2] / _weights[2])),
    view=lambda drawn: 0.5 * np.log(drawn[:, :2] / drawn[:, 2:]),
  ),
  "StudentT": Row(
    D.StudentT,
    {"df": t([3.0, 5.0]), "loc": LOC, "scale": SCALE},
    ("df", t([0.0, 1.0])),
    stats.t([3, 5], _loc, _scale),
    gradient_rtol=FIT_RTOL,
  ),
  "TransformedDistribution": Row(
    lambda loc, scale, **kwargs: D.TransformedDistribution(
      D.Normal(loc, scale, **kwargs),
      [D.SigmoidTransform(), D.AffineTransform(1.0, 2.0)],
      **kwargs,
    ),
    {"loc": LOC, "scale": SCALE},
    ("scale", t([0.0, 1.0])),
    _normal,
    view=lambda drawn: _logit((drawn - 1) / 2),
    cls=D.TransformedDistribution,
  ),
  "Uniform": Row(
    D.Uniform,
    {"low": t([0.0, 1.0]), "high": t([1.0, 3.0])},
    ("high", t([-1.0, 3.0])),
    stats.uniform([0, 1], [1, 2]),
  ),
  "VonMises": Row(
    D.VonMises,
    {"loc": LOC, "concentration": t([1.0, 4.0])},
    ("concentration", t([0.0, 1.0])),
    stats.vonmises([1.0, 4.0]),
    view=lambda drawn: (drawn - _loc + np.pi) % (2 * np.pi) - np.pi,
    undrawable="torch rejects numbers until all are accepted: data decides how many",
  ),
  "Weibull": Row(
    D.Weibull,
    {"scale": SCALE, "concentration": t([1.0, 2.0])},
    ("scale", t([0.0, 1.0])),
    stats.weibull_min([1, 2], scale=_scale),
  ),
  "Wishart": Row(
    D.Wishart,
    {"df": t(4.0), "scale_tril": TRIL},
    ("df", t(0.5)),
    # For W ~ Wishart(df, Σ) and any vector a: aᵀWa / aᵀΣa is chi-square.
    stats.chi2([4, 4, 4]),
    view=lambda drawn: np.stack(
      [
        drawn[:, 0, 0] / _covariance[0, 0],
        drawn[:, 1, 1] / _covariance[1, 1],
        drawn.sum((-1, -2)) / _covariance.sum(),
      ],
      axis=-1,
    ),
    undrawable="torch draws again where a matrix is singular: data decides how often",
    no_gradient="torch 2.13 changes a mask in place that its gradient needs",
  ),
}


# Pairs with a formula for the divergence: two rows, or one row twice.
KL_PAIRS = (
  ("Bernoulli", "Bernoulli"),
  ("Beta", "Beta"),
  ("Binomial", "Binomial"),
  ("Categorical", "Categorical"),
  ("Cauchy", "Cauchy"),
  ("ContinuousBernoulli", "ContinuousBernoulli"),
  ("Dirichlet", "Dirichlet"),
  ("Exponential", "Exponential"),
  ("Exponential", "Gamma"),
  ("Exponential", "Normal"),
  ("Gamma", "Gamma"),
  ("Gamma", "Exponential"),
  ("Geometric", "Geometric"),
  ("Gumbel", "Gumbel"),
  ("HalfNormal", "HalfNormal"),
  ("Independent", "Independent"),
  ("Laplace", "Laplace"),
  ("Laplace", "Normal"),
  ("LogNormal", "LogNormal"),
  ("LowRankMultivariateNormal", "MultivariateNormal"),
  ("MultivariateNormal", "MultivariateNormal"),
  ("Normal", "Normal"),
  ("Normal", "Gumbel"),
  ("OneHotCategorical", "OneHotCategorical"),
  ("Pareto", "Exponential"),
  ("Poisson", "Poisson"),
  ("Uniform", "Normal"),
  ("Uniform", "Uniform"),
)
