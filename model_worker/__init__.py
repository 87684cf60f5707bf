"""The model worker: executes plans on a device. The only package that imports torch; this file does not."""
