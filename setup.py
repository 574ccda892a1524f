"""Packaging of torchax; tool settings are in `pyproject.toml`."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
URL = "https://github.com/torchax/torchax"


def read_version() -> str:
  """The version, without importing torchax: its requirements may be missing."""
  text = (ROOT / "torchax" / "version.py").read_text(encoding="utf-8")
  found = re.search(r'^VERSION = "([^"]+)"$', text, re.MULTILINE)
  if found is None:
    raise RuntimeError('torchax/version.py must hold a line VERSION = "x.y.z".')
  return found.group(1)


def long_description() -> str:
  """The README as an index shows it: a link into the tree becomes an absolute one."""
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  link = re.compile(r"\]\((?!https?:|#|mailto:)([^)\s]+)\)")
  return link.sub(rf"]({URL}/blob/main/\1)", text)


# torch and JAX take their accelerators in different builds: torchax needs JAX's only.
ACCELERATORS = {
  "gpu": ["jax[cuda13]>=0.10.0"],
  "tpu": ["jax[tpu]>=0.10.0"],
}
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
  "lint": ["mypy>=2.0", "ruff>=0.12"],
  "plot": ["matplotlib>=3.9"],  # the picture of a ledger of draws
  "test": [
    "cloudpickle>=3.0",
    "expecttest>=0.3",  # torch.testing._internal, whose op_db is swept, imports it
    "hypothesis>=6.100",
    "mypy>=2.0",  # programs that call torchax are type-checked by a test
    "packaging>=24.0",
    "pytest>=8.2",
    "pytest-xdist>=3.6",
    "safetensors>=0.5",
    "scipy>=1.13",  # KS and chi-square tests of the samplers
    "setuptools>=77",  # the wheel is built by a test, without the network
    "wheel>=0.43",
  ],
}
# Libraries around torch whose programs `make test-ecosystem` runs. They bring many
# packages of their own, so they are not for every development environment.
ECOSYSTEM = [
  "accelerate>=1.6",
  "diffusers>=0.36",
  "gpytorch>=1.14",
  "gymnasium>=1.0",
  "kornia>=0.8",
  "lightning>=2.5",
  "peft>=0.18",
  "safetensors>=0.5",
  "torch-geometric>=2.6",
  "torchao>=0.15",
  "torchdiffeq>=0.2.5",
  "torchmetrics>=1.6",
  "transformers>=5.0",
  "x-transformers>=2.3",
]
# For development; an accelerator's packages would replace those of the CPU.
EXTRAS["all"] = sorted({name for names in EXTRAS.values() for name in names})

setup(
  name="torchax",
  version=read_version(),
  description="Runs PyTorch programs on JAX, with an explicit random state.",
  long_description=long_description(),
  long_description_content_type="text/markdown",
  author="The torchax authors",
  url=URL,
  project_urls={
    "Documentation": f"{URL}/tree/main/docs",
    "Source": URL,
    "Issues": f"{URL}/issues",
    "Changelog": f"{URL}/blob/main/CHANGELOG.md",
  },
  keywords=["pytorch", "jax", "xla", "tpu", "gpu", "deep learning", "random numbers"],
  license_expression="Apache-2.0",
  license_files=["LICENSE"],
  python_requires=">=3.11",
  packages=find_packages(include=["torchax", "torchax.*"]),
  package_data={"torchax": ["py.typed"]},
  install_requires=REQUIRES,
  extras_require={**EXTRAS, **ACCELERATORS, "ecosystem": ECOSYSTEM},
  entry_points={"torch_dynamo_backends": ["jax = torchax.dynamo:backend"]},
  classifiers=[
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Operating System :: OS Independent",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
  ],
)
