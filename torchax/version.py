"""Version of the package; `pyproject.toml` names it.

The number is the release of google/torchax whose API this package has, so it meets
requirements such as `torchax>=0.0.13`. The local label `+rng.N` marks this package.
"""

VERSION = "0.0.14+rng.1"
