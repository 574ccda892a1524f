"""Programs that run in processes of their own."""

import os
import subprocess
import sys


def run(program: str, seconds: float = 120, **environment: str) -> str:
  """Run a program; return its output.

  Raises:
    AssertionError: it failed, or hangs: it exceeded the time limit.
  """
  try:
    result = subprocess.run(
      [sys.executable, "-W", "ignore", "-c", program],
      capture_output=True,
      text=True,
      check=False,
      timeout=seconds,
      env={**os.environ, **environment},
    )
  except subprocess.TimeoutExpired as error:
    raise AssertionError(f"no end within {seconds} s; printed {error.stdout}") from None
  assert result.returncode == 0, f"{result.returncode}: {result.stderr[-4000:]}"
  return result.stdout
