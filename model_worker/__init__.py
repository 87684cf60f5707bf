"""The model worker: executes plans on a device. The only package that imports torch; importing it does not."""
