"""The finders of an audit: each function finds the problems of one kind.

``FINDERS`` in ``_audit/findings.py`` lists them.
"""
