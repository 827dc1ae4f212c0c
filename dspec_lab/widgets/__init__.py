"""Panels: one a file, each with controls that redraw it and a `static()` figure for use without a front end."""
