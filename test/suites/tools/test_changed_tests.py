"""`tools/changed_tests.py`, on a small project that is made here."""

import subprocess

import pytest

from tools import changed_tests

FILES = {
  "torchax/__init__.py": "from torchax.core import storage\nfrom torchax import top",
  "torchax/core/__init__.py": "",
  "torchax/core/storage.py": "",
  "torchax/core/views.py": "from torchax.core.storage import Storage",
  "torchax/core/alone.py": "",
  "torchax/core/_words.py": "",
  "torchax/top.py": "from torchax.core import views",
  "tools/__init__.py": "",
  "tools/table.py": "",
  "docs/page.md": "",
  "test/helper.py": "",
  "test/ops/rows.py": "import helper",
  "test/core/test_storage.py": "from torchax.core import storage",
  "test/core/test_views.py": "import torchax",
  "test/core/test_views_of_masks.py": "import torchax",
  "test/core/test_view.py": "import torchax",
  "test/core/test_words.py": "import torchax",
  "test/test_top.py": "import torchax.top",
  "test/ops/test_rows.py": "from ops.rows import ROW",
  "test/suites/tools/test_table.py": "from tools import table",
  "test/suites/house/test_docs.py": "",
  "test/suites/house/test_style.py": "",
}


@pytest.fixture
def project(tmp_path):
  for name, text in FILES.items():
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return tmp_path


@pytest.mark.parametrize(
  "changed, tests",
  [
    # Importers of a module, one level up, and not `torchax` itself.
    ("torchax/core/storage.py", {"core/test_storage.py"}),
    (
      "torchax/core/views.py",
      {"core/test_views.py", "core/test_views_of_masks.py", "test_top.py"},
    ),
    ("torchax/core/alone.py", set()),
    ("torchax/core/_words.py", {"core/test_words.py"}),
    ("torchax/core/deleted.py", set()),
    ("test/core/test_view.py", {"core/test_view.py"}),
    # Helpers of tests, at any depth.
    ("test/helper.py", {"ops/test_rows.py"}),
    ("tools/table.py", {"suites/tools/test_table.py"}),
    ("docs/page.md", {"suites/house/test_docs.py"}),
  ],
)
def test_a_change_concerns_tests_by_imports_and_name(project, changed, tests):
  found = changed_tests.select_tests([changed], project)
  always = {"test/suites/house/test_style.py"}
  assert set(found) == {f"test/{name}" for name in tests} | always


def test_new_and_changed_files_are_found(project, monkeypatch):
  def git(*arguments):
    own = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", *own, *arguments], cwd=project, check=True)

  git("init", "-q", "-b", "main")
  git("add", ".")
  git("commit", "-q", "-m", "base")
  git("checkout", "-q", "-b", "work")
  (project / "torchax/top.py").write_text("# committed")
  git("commit", "-q", "-a", "-m", "work")
  (project / "docs/page.md").write_text("changed")
  (project / "test/test_new.py").write_text("")
  monkeypatch.setattr(changed_tests, "ROOT", project)
  found = changed_tests.changed_files("main")
  assert found == {"torchax/top.py", "docs/page.md", "test/test_new.py"}


def test_an_unknown_branch_is_an_error(project, monkeypatch):
  monkeypatch.setattr(changed_tests, "ROOT", project)
  with pytest.raises(subprocess.CalledProcessError):
    changed_tests.changed_files("no-such-branch")
