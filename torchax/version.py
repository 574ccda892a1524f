"""The version of the package, in one place; `setup.py` reads this file as text."""

VERSION = "0.1.0"
