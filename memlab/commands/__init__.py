"""The commands, one per module.

Each has two functions: ``add_arguments`` declares its flags, and ``prepare`` checks the values of the flags and returns
the job to do. The user can correct a `ValueError` that ``prepare`` raises; an error of the job is a failure.
"""
