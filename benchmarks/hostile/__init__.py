"""Requests that mean harm: what is wrong with them, and what they do to a server."""
