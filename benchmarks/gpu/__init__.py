"""Measurements that need a GPU, and checks that need a GPU's compiler."""
