"""Checks of the exercises in the labs: goals for a record, an audit, a formula or code, which print a line each."""
