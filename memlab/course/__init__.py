"""A course that a teacher can adopt: notebooks for students and their solutions, slides, and lecture plans."""
