"""The version of this package, in a module of its own that imports nothing: every part may read it."""

__version__ = "0.1.0"
