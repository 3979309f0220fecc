"""Hostile requests and files, and their effect on a server."""
