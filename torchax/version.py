"""Version of the package; `setup.py` reads this file as text."""

VERSION = "0.1.0"
