"""model_worker: executes BatchPlans on a device. The only package that imports torch; importing this name alone does not."""
