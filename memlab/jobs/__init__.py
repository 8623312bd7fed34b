"""Jobs of other frameworks: their files are read into a scenario and settings, and written from them.

Only this package knows a framework. Each framework has one table of keys, which serves both directions. Nothing that a
file contains is ever executed.
"""
