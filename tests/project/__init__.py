"""Rules of the project itself: imports, sizes, names, docstrings, documents. A rule comes with a planted
breach.
"""
