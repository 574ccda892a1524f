"""Packaging of torchax; tool settings are in `pyproject.toml`."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent


def read_version() -> str:
  """The version, without importing torchax: its requirements may be missing."""
  text = (ROOT / "torchax" / "version.py").read_text(encoding="utf-8")
  found = re.search(r'^VERSION = "([^"]+)"$', text, re.MULTILINE)
  if found is None:
    raise RuntimeError('torchax/version.py must hold a line VERSION = "x.y.z".')
  return found.group(1)


# Lower bounds are the versions that the `lowest` job of the workflow installs.
REQUIRES = [
  "torch>=2.11",
  "jax>=0.10.0",
  "jaxlib>=0.10.0",
  "numpy>=2.0",
  "absl-py>=2.0",
]
EXTRAS = {
  "checkpoint": ["orbax-checkpoint>=0.12"],
  "export": ["flatbuffers>=24.3"],  # `jax.export` writes programs to files with it
  "flax": ["flax>=0.12"],
  # Libraries whose use of keys is tested.
  "interop": ["dm-haiku>=0.0.17", "equinox>=0.13", "numpyro>=0.22"],
  # Whose models are compared with CPU torch.
  "models": ["transformers>=5.23"],
  "optax": ["optax>=0.2.4"],
  "examples": ["scikit-learn>=1.5", "matplotlib>=3.9", "tqdm>=4.66"],
  "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5"],
  "lint": ["ruff>=0.12"],
  "test": [
    "expecttest>=0.3",  # torch.testing._internal, whose op_db is swept, imports it
    "hypothesis>=6.100",
    "packaging>=24.0",
    "pytest>=8.2",
    "pytest-xdist>=3.6",
    "scipy>=1.13",  # KS and chi-square tests of the samplers
    "setuptools>=77",  # the wheel is built by a test, without the network
    "wheel>=0.43",
  ],
}
EXTRAS["all"] = sorted({name for names in EXTRAS.values() for name in names})

setup(
  name="torchax",
  version=read_version(),
  description="Runs PyTorch programs on JAX, with an explicit random state.",
  long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  license_files=["LICENSE"],
  python_requires=">=3.11",
  packages=find_packages(include=["torchax", "torchax.*"]),
  install_requires=REQUIRES,
  extras_require=EXTRAS,
  entry_points={"torch_dynamo_backends": ["jax = torchax.dynamo:backend"]},
  classifiers=[
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
  ],
)
