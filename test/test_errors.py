"""Errors: their messages link to the documentation."""

import pickle

import pytest
from source_tree import PROJECT, ROOT

from torchax import errors
from torchax.errors import MixedDeviceError, TracedStateError

CLASSES = [
  value
  for value in vars(errors).values()
  if isinstance(value, type) and value.__module__ == errors.__name__
]
DOCUMENTED = [cls for cls in CLASSES if cls is not errors.Documented]
each_class = pytest.mark.parametrize("cls", DOCUMENTED, ids=lambda cls: cls.__name__)


@each_class
def test_each_exception_has_a_section_in_the_docs(cls):
  page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
  assert f"\n## {cls.__name__}\n" in page


@each_class
def test_message_ends_with_link_to_its_section(cls):
  if issubclass(cls, Warning):
    return  # its message is one line of a log
  error = cls("What happened.")
  first, last = str(error).splitlines()
  assert (first, error.text, error.args) == (*["What happened."] * 2, (first,))
  assert last == f"See {errors.PAGE}#{cls.__name__.lower()}"
  assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_link_points_to_the_package_repository():
  source = PROJECT["urls"]["Source"]
  assert f"{source}/blob/main/docs/errors.md" == errors.PAGE


def test_exception_of_another_module_links_to_its_base():
  class Inner(MixedDeviceError):
    pass

  assert str(Inner("x")).endswith("#mixeddeviceerror")


def test_traced_state_error_is_not_an_rng_error():
  assert not issubclass(TracedStateError, errors.RngError)
