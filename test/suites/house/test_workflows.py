"""Workflows of `.github`: pinned actions, rights, versions, and tests of a change."""

import os
import re
import subprocess

import pytest
import yaml
from packaging.requirements import Requirement
from source_tree import PROJECT, ROOT

FILES = sorted((ROOT / ".github").glob("[aw]*/**/*.yml"))
WORKFLOWS = {
  path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
  for path in FILES
  if path.parent.name == "workflows"
}
CI = WORKFLOWS["ci"]
NOTES = next(s for s in WORKFLOWS["release"]["jobs"]["build"]["steps"] if "id" in s)
PUBLISH = WORKFLOWS["site"]["jobs"]["publish"]["steps"][-1]
VERSION = next(s for s in WORKFLOWS["site"]["jobs"]["build"]["steps"] if "id" in s)
COMPARE = next(s for s in CI["jobs"]["changes"]["steps"] if "id" in s)


def _commands(job: str) -> str:
  return "\n".join(step.get("run", "") for step in CI["jobs"][job]["steps"])


def _run(step: dict, folder, **environment: str) -> int:
  """Run the commands of a step as a workflow does."""
  shell = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"])
  given = {**os.environ, **environment}
  return subprocess.run(shell, cwd=folder, env=given, check=False).returncode


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name + path.stem)
def test_actions_are_pinned_by_hash_with_their_version(path):
  used = re.findall(r"uses: (?!\./)(.*)", path.read_text(encoding="utf-8"))
  pinned = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
  assert used and all(pinned.fullmatch(action) for action in used)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_reads_only_and_its_jobs_end(name):
  workflow = WORKFLOWS[name]
  assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]
  assert all(job["timeout-minutes"] for job in workflow["jobs"].values())


def test_only_jobs_without_code_of_the_project_may_write():
  jobs = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
  writing = [job for job in jobs if "permissions" in job]
  used = [step.get("uses", "") for job in writing for step in job["steps"]]
  assert len(writing) == 3 and not any("checkout" in action for action in used)


def test_the_lowest_job_installs_and_asserts_the_lower_bounds():
  requirements = [Requirement(name) for name in CI["env"]["LOWEST"].split()]
  required = [name.replace(">=", "==") for name in PROJECT["dependencies"]]
  assert sorted(map(str, requirements)) == sorted(required)
  first, *_, last = re.findall(r"pip install.*\$LOWEST", _commands("lowest"))
  assert "--no-index --no-deps" in last and "--no-index" not in first


def test_torch_comes_from_its_cpu_builds():
  (setup,) = (path for path in FILES if path.name == "action.yml")
  assert "=https://download.pytorch.org/whl/cpu" in setup.read_text(encoding="utf-8")


def test_ci_runs_newest_and_prerelease_versions_each_night():
  # YAML reads the key `on` as True.
  assert CI[True]["schedule"][0]["cron"]
  assert "schedule" in CI["jobs"]["prerelease"]["if"]
  assert "constraints" not in _commands("newest")
  assert "examples/train_digits.py" in _commands("newest")
  assert re.search("--pre torch(.|\n)*--pre jax", _commands("prerelease"))
  for job in ("lowest", "newest", "prerelease"):
    assert "python -m torchax" in _commands(job) and "$PYTEST" in _commands(job)


@pytest.mark.parametrize(
  ("changed", "code"),
  [
    (["docs/rng.md", "README.md", "mkdocs.yml"], "false"),
    (["docs/rng.md", "torchax/tensor.py"], "true"),
    (["test/docs/a.py"], "true"),
    ([], "true"),
    (None, "true"),
  ],
  ids=["docs", "docs and code", "other docs", "nothing", "no base"],
)
def test_a_change_of_the_documentation_runs_no_other_tests(tmp_path, changed, code):
  found = tmp_path / "output"
  fake = "exit 128" if changed is None else "\n".join(f"echo {c}" for c in changed)
  step = {"run": f"git() {{\n{fake or ':'}\n}}\n{COMPARE['run']}"}
  assert _run(step, tmp_path, BASE="base", GITHUB_OUTPUT=str(found)) == 0
  assert found.read_text() == f"code={code}\n"
  tests = {"test", "lowest", "newest", "wheel"}
  assert tests == {k for k, job in CI["jobs"].items() if job.get("needs") == "changes"}
  assert all("outputs.code == 'true'" in CI["jobs"][name]["if"] for name in tests)


@pytest.mark.parametrize(("tag", "status"), [("v0.2", 0), ("v0.20", 1), ("v0.1", 0)])
def test_the_notes_of_a_release_are_its_section_of_the_changelog(tmp_path, tag, status):
  sections = "# Changelog\n\n## 0.2 (2026)\n\n### Added\n\n- new\n\n## 0.1\n\n- old\n"
  (tmp_path / "CHANGELOG.md").write_text(sections)
  assert _run(NOTES, tmp_path, GITHUB_REF_NAME=tag) == status
  words = (tmp_path / "notes.md").read_text().split()
  assert words == {"v0.2": ["###", "Added", "-", "new"], "v0.1": ["-", "old"]}.get(
    tag, []
  )


def _commits(folder, branch: str) -> list[str]:
  command = ["git", "log", "--format=%s", branch]
  done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
  return done.stdout.splitlines()


def test_versions_of_the_site_are_added_to_the_published_ones(tmp_path):
  """Two runs, with a repository on this machine, and without the tool that builds."""
  git = "git -c user.name=test -c user.email=test@localhost"
  fake = (
    f"mike() {{ git checkout -q gh-pages || git checkout -q --orphan gh-pages; "
    f'{git} commit -q --allow-empty -m "$*"; git checkout -q --detach; }}'
  )
  step = {"run": f"{fake}\n{VERSION['run']}"}
  remote = tmp_path / "remote.git"
  assert _run({"run": f"git init -q --bare {remote}"}, tmp_path) == 0
  hosted = "https://x:token@github.com/torchax/torchax"
  given = {
    "GH_TOKEN": "token",
    "GITHUB_REPOSITORY": "torchax/torchax",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": f"url.{remote}.insteadOf",
    "GIT_CONFIG_VALUE_0": hosted,
  }
  fetch = "git fetch origin 'refs/heads/gh-pages*:refs/heads/gh-pages*'"
  assert fetch in [s.get("run") for s in WORKFLOWS["site"]["jobs"]["build"]["steps"]]
  for name, kind in (("main", "branch"), ("v0.2", "tag")):
    folder = tmp_path / name
    start = f"git init -q . && git remote add origin {remote} && {fetch}"
    folder.mkdir()
    assert _run({"run": start}, folder) == 0
    assert _run(step, folder, GITHUB_REF_TYPE=kind, GITHUB_REF_NAME=name) == 0
    assert _run(PUBLISH, folder, **given) == 0
  assert _commits(remote, "gh-pages") == [
    "deploy --update-aliases 0.2 stable",
    "set-default latest",
    "deploy --title main latest",
  ]
