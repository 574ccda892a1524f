"""Packaging for tools that run this file; all metadata is in `pyproject.toml`."""

from setuptools import setup

setup()
