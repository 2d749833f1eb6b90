"""Hostile bytes: parsers and the native decoder under tools that notice what tests do not."""
