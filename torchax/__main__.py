"""`python -m torchax`: report of versions, devices and random state, and quick checks.

The checks take a few seconds. The exit status is 1 if one of them fails.
"""

import sys

from torchax.diagnostics import report, self_check


def main() -> int:
  """Print the report and run the checks; return the exit status."""
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
