"""The version, alone in its file so that the build reads it without importing the package."""

__version__ = "0.2.0.dev0"
