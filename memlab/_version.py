"""The version of memlab, in a module that imports nothing."""

__version__ = "0.4.0"
