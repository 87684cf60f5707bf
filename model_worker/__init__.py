"""The model worker: executes plans on a device. It is the only package that imports torch; this file does
not.
"""
