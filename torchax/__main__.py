"""`python -m torchax`: versions, devices, the random state, and a check of seconds.

The exit status is 1 where a check fails.
"""

import sys

from torchax.diagnostics import report, self_check


def main() -> int:
  """Writes the report; returns the exit status."""
  sys.stdout.write(f"{report.env_info()}\n\nchecks\n")
  failed = 0
  for name in self_check.CHECKS:
    result = self_check.run(name)
    failed += result.failed
    sys.stdout.write(f"  {result}\n")
    sys.stdout.flush()
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
