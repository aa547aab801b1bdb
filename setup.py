"""The entry point of the build; pyproject.toml says everything, and no build step needs torch."""

from setuptools import setup

setup()
