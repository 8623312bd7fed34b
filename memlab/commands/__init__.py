"""The commands, one a module.

Each has two functions: ``add_arguments`` declares its flags, and ``prepare`` checks what was given and returns the
job to do. A `ValueError` of ``prepare`` is for the user
to correct; an error of the job is not.
"""
