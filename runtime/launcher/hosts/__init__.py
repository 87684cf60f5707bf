"""Where a launch's processes run: this machine, or others that have joined it."""
